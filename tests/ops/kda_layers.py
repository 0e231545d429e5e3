"""Calls of KDA's layer, and the same composed of public ops."""

import torch
import torch.nn.functional as F

from holdfast.ops import causal_conv1d, gated_rms_norm, kda
from holdfast.ops.kda_layer import kda_layer

TENSORS = (
    "packed", "conv_weight", "norm_weight", "decay_weight", "gate_weight", "gate_bias", "A_log", "dt_bias",
    "initial_state", "tail",
)  # fmt: skip


def example(
    B=2, T=11, Hq=2, H=4, K=6, V=5, W=4, rest=3, bound=None, state=True, lengths=None, dtype=torch.float64,
    device="cpu", seed=0,
):  # fmt: skip
    """Tensors of a call, and what else it takes. rest: columns that nothing reads. lengths: of packed sequences.

    Weights and gates stay in float32 beside 16-bit inputs, as under autocast.
    """
    draw = torch.Generator().manual_seed(seed)
    wide, sequences, offsets = torch.promote_types(dtype, torch.float32), B, None
    if lengths is not None:
        B, T, sequences = 1, sum(lengths), len(lengths)
        offsets = torch.tensor((0, *lengths), device=device).cumsum(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=draw)).to(device, wide)

    channels = 2 * Hq * K + H * V
    tensors = {
        "packed": normal(B, T, channels + 2 * V + H + rest).to(dtype),
        "conv_weight": normal(channels, W, scale=W**-0.5),
        "norm_weight": 1 + normal(V, scale=0.1),
        "decay_weight": normal(H * K, V, scale=V**-0.5),
        "gate_weight": normal(H * V, V, scale=V**-0.5),
        "gate_bias": normal(H * V),
        "A_log": normal(H),
        "dt_bias": normal(H, K),
        "initial_state": normal(sequences, H, K, V) if state else None,
        "tail": normal(sequences, W - 1, channels) if state else None,
    }
    return tensors, {"query_heads": Hq, "key_dim": K, "lower_bound": bound, "cu_seqlens": offsets}


def fused(tensors, query_heads, key_dim, lower_bound, cu_seqlens, allow_neg_eigval=True):
    given = (tensors[name] for name in TENSORS)
    return kda_layer(*given, query_heads, key_dim, lower_bound, allow_neg_eigval, 1e-5, cu_seqlens, None)


def composed(tensors, query_heads, key_dim, lower_bound, cu_seqlens, allow_neg_eigval=True):
    """The layer by public ops on views of the projection."""
    packed, weight, norm_weight, F_2, G_2, bias, A_log, dt_bias, state, tail = (tensors[name] for name in TENSORS)
    keys, value_dim = query_heads * key_dim, norm_weight.shape[0]
    values = weight.shape[0] - 2 * keys
    heads = values // value_dim
    widths = [2 * keys + values, value_dim, value_dim, heads]
    qkv, f, z, b, _ = packed.split([*widths, packed.shape[2] - sum(widths)], -1)
    qkv, tail = causal_conv1d(qkv, weight, None, "silu", tail, True, cu_seqlens)
    q, k, v = qkv.split([keys, keys, values], -1)
    g, gate = F.linear(f, F_2.to(f.dtype)), F.linear(z, G_2.to(z.dtype), bias.to(z.dtype))
    o, state = kda(
        *(x.unflatten(-1, (query_heads, key_dim)) for x in (q, k)),
        v.unflatten(-1, (heads, value_dim)),
        g.unflatten(-1, (heads, key_dim)),
        b,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        qk_l2norm=True,
        beta_sigmoid=True,
        allow_neg_eigval=allow_neg_eigval,
    )
    gate = gate.unflatten(-1, (heads, value_dim))
    return gated_rms_norm(o, gate, norm_weight, activation="sigmoid").flatten(-2), state, tail
