"""Calls of a delta rule's layer, and the same composed of public ops."""

import torch

from holdfast.ops import causal_conv1d, delta_rule, gated_delta_rule, gated_rms_norm
from holdfast.ops.delta_layer import delta_layer
from parity import relative_error

TENSORS = ("packed", "conv_weight", "norm_weight", "A_log", "dt_bias", "initial_state", "tail")


def example(
    B=2, T=11, Hq=2, H=4, K=6, V=5, W=4, rest=3, gated=True, state=True, lengths=None, dtype=torch.float64,
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
    packed = normal(B, T, channels + (H * V + H if gated else 0) + H + rest)
    tensors = {
        "packed": packed.to(dtype),
        "conv_weight": normal(channels, W, scale=W**-0.5),
        "norm_weight": 1 + normal(V, scale=0.1),
        "A_log": normal(H) if gated else None,
        "dt_bias": normal(H) if gated else None,
        "initial_state": normal(sequences, H, K, V) if state else None,
        "tail": normal(sequences, W - 1, channels) if state else None,
    }
    return tensors, {"query_heads": Hq, "key_dim": K, "cu_seqlens": offsets}


def fused(tensors, query_heads, key_dim, cu_seqlens, allow_neg_eigval=True, backend=None):
    given = (tensors[name] for name in TENSORS)
    return delta_layer(*given, query_heads, key_dim, allow_neg_eigval, 1e-5, cu_seqlens, backend)


def composed(tensors, query_heads, key_dim, cu_seqlens, allow_neg_eigval=True, backend=None):
    """The layer by public ops on views of the projection."""
    packed, weight, norm_weight, A_log, dt_bias, state, tail = (tensors[name] for name in TENSORS)
    keys, value_dim = query_heads * key_dim, norm_weight.shape[0]
    values = weight.shape[0] - 2 * keys
    heads = values // value_dim
    widths = [2 * keys + values, *([values, heads] if A_log is not None else []), heads]
    qkv, *gates, b, _ = packed.split([*widths, packed.shape[2] - sum(widths)], -1)
    qkv, tail = causal_conv1d(qkv, weight, None, "silu", tail, True, cu_seqlens)
    q, k, v = qkv.split([keys, keys, values], -1)
    q, k = (x.unflatten(-1, (query_heads, key_dim)) for x in (q, k))
    v = v.unflatten(-1, (heads, value_dim))
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens, "backend": backend}
    options |= {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": allow_neg_eigval}
    if A_log is None:
        o, state = delta_rule(q, k, v, b, **options)
        return gated_rms_norm(o, None, norm_weight).flatten(-2), state, tail
    gate, a = gates
    o, state = gated_delta_rule(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, **options)
    return gated_rms_norm(o, gate.unflatten(-1, (heads, value_dim)), norm_weight).flatten(-2), state, tail


def values_and_grads(run, tensors, rest, dtype=None, unused=(), **options):
    """name -> results and gradients of all tensors. dtype: run in it. unused: outputs that no loss is made of."""
    leaves = {name: None if x is None else x.detach().to(dtype or x.dtype) for name, x in tensors.items()}
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in leaves.items()}
    made = dict(zip(("y", "state", "tail_after"), run(leaves, **rest, **options), strict=True))
    used = {name: x for name, x in leaves.items() if x is not None}
    draw = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(x.shape, generator=draw).to(x) for name, x in made.items()}
    loss = [(x * weights[name]).sum() for name, x in made.items() if name not in unused]
    grads = torch.autograd.grad(loss, list(used.values()), allow_unused=True, materialize_grads=True)
    return made | {f"d{name}": x for name, x in zip(used, grads, strict=True)}


def same(got, right, limit):
    """Names, dtypes and shapes are alike, and numbers up to limit."""
    assert got.keys() == right.keys()
    for name, x in right.items():
        assert got[name].dtype == x.dtype, name
        assert got[name].shape == x.shape, name
        assert not x.numel() or relative_error(got[name].double(), x.double()) <= limit, name
