"""mLSTM with what stands around it in a layer, from the layer's projections to the input of its last one.

One custom op a pass: kernels read the projection where it lies, and its gradient is put together in one tensor.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.matrix.variants import GradRoom
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.mlstm import Gating, State
from holdfast.recurrences.mlstm import gates as plain_gates
from holdfast.recurrences.oracle_matrix import compute_dtype

from . import matrix, mlstm_gates
from .autocast import without_autocast
from .check import name_of, needs_grad
from .gated_rms_norm import select as select_norm
from .mlstm_gates import can_fuse
from .registration import define, differentiable
from .soft_cap import cap_gradient, capped

# of the normaliser, as `mlstm` has it by default
EPS = 1e-6


def mlstm_layer(
    packed: Tensor,
    gate_bias: Tensor,
    norm_weight: Tensor,
    initial_state: State | None,
    key_dim: int,
    gating: Gating,
    normalize: bool,
    cap: float | None,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, State]:
    """What `nn.MLSTM` is between its projections:

        i, f = soft_cap(gates + gate_bias);  h = mlstm(q, k, v, i, f);  y = layernorm(h) sigmoid(gate)

    The same as `soft_cap`, `mlstm` and `gated_rms_norm` with center. Arguments are not checked.

    Args:
        packed: the projection [B, T, P], channels side by side: q, k [H * K each], v, gate [H * V each], gates [2 H],
            which are i and f before bias and cap, and any number that nothing reads.
        gate_bias: [2 H], added in float32 or wider. norm_weight: [H, V]. key_dim: K.
        initial_state: (C, n, m), as `mlstm` takes them. gating, normalize: as `mlstm` has them.
        cap: of the gates, or None. eps: of the norm.
        cu_seqlens: int32 or int64 [N + 1], or None. backend: of `mlstm`.

    Returns:
        y [B, T, H * V] in packed's dtype, and the state to continue from.
    """
    C, n, m = initial_state or (None, None, None)
    state = C if C is None or not normalize else torch.cat([C, n[..., None]], -1)
    tensors = (packed, gate_bias, norm_weight, state, m)
    options = (key_dim, gating == "exp", normalize, 0.0 if cap is None else float(cap), eps)
    y, final, last, *_ = _differentiable(*tensors, *options, cu_seqlens, needs_grad(*tensors), name_of(backend))
    if normalize:
        return y, (final[..., :-1], final[..., -1], last)
    return y, (final, final.new_zeros(final.shape[:3]) if n is None else n.clone(), last)


def _parts(packed: Tensor, norm_weight: Tensor, key_dim: int) -> list[Tensor]:
    """q, k [B, T, H, K], v, gate [B, T, H, V], gates [B, T, 2 H], and what nothing reads."""
    heads, width = norm_weight.shape
    widths = [heads * key_dim, heads * key_dim, heads * width, heads * width, 2 * heads]
    *parts, gates, rest = packed.split([*widths, packed.shape[2] - sum(widths)], -1)
    return [*(x.unflatten(-1, (heads, -1)) for x in parts), gates, rest]


def _open(gates: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """i and f [B, T, H], of gates with their bias."""
    return (capped(gates, cap) if cap else gates).chunk(2, -1)


def _call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, m: Tensor, state: Tensor | None, normalize: bool
) -> MatrixCall:
    return MatrixCall(q, k, v, g, beta, m if normalize else None, state, scale=q.shape[3] ** -0.5, eps=EPS)


def _by_head(x: Tensor) -> Tensor:
    """x [B, T, H], a head's tokens side by side, as kernels leave it."""
    by_head = x.transpose(1, 2)
    return x if by_head.is_contiguous() else by_head.contiguous().transpose(1, 2)


def _forward(
    packed: Tensor,
    gate_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor | None,
    m: Tensor | None,
    key_dim: int,
    exponential: bool,
    normalize: bool,
    cap: float,
    eps: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, the state and the last m; for the backward pass log decay, beta, stabiliser, gates, h and what it saved.

    state: [N, H, K, V], with normalize a column more, n; m: [N, H]; None for 0. cap: 0 for none.
    """
    q, k, v, gate, gates, _ = _parts(packed, norm_weight, key_dim)
    wide = compute_dtype(packed.dtype)
    with without_autocast(packed):
        gates = gates + gate_bias.to(wide)
        i, f = _open(gates, cap)
        find = mlstm_gates.fused_gates if can_fuse(i, f, wide) else partial(plain_gates, wide=wide)
        g, beta, stabilizer, last = find(i, f, m, cu_seqlens, exponential)
        g, beta, stabilizer = (_by_head(x) for x in (g, beta, stabilizer))
        call = _call(q, k, v, g, beta, stabilizer, state, normalize)
        h, final, kept = matrix.matrix_forward(*call, cu_seqlens, "mlstm", grad, backend)
        norm = GatedNormCall(h, gate, norm_weight, eps, "sigmoid", True)
        chosen, plan = select_norm(norm, grad, "forward", "")
        y = chosen.forward(plan, norm)
    return y.flatten(2), final, last.contiguous(), g, beta, stabilizer, gates, h, kept


def _forward_fake(
    packed, gate_bias, norm_weight, state, m, key_dim, exponential, normalize, cap, eps, cu_seqlens, grad, backend
):  # fmt: skip
    q, k, v, *_ = _parts(packed, norm_weight, key_dim)
    batch, length, heads, _ = v.shape
    wide = compute_dtype(packed.dtype)
    g, beta, stabilizer = (packed.new_empty(batch, heads, length, dtype=wide).transpose(1, 2) for _ in range(3))
    call = _call(q, k, v, g, beta, stabilizer, state, normalize)
    h, final, kept = matrix.fake_of(call, cu_seqlens, "mlstm", grad, backend)
    y, last = packed.new_empty(batch, length, v.shape[2] * v.shape[3]), packed.new_empty(final.shape[:2], dtype=wide)
    return y, final, last, g, beta, stabilizer, packed.new_empty(batch, length, 2 * heads, dtype=wide), h, kept


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    grad_last: Tensor | None,
    packed: Tensor,
    gate_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor | None,
    m: Tensor | None,
    g: Tensor,
    beta: Tensor,
    stabilizer: Tensor,
    gates: Tensor,
    h: Tensor,
    kept: Tensor | None,
    key_dim: int,
    exponential: bool,
    normalize: bool,
    cap: float,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first five of `_forward`'s arguments; an empty tensor for one that was not given."""
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    q, k, v, gate, _, _ = _parts(packed, norm_weight, key_dim)
    *places, dgate, into_gates, unused = _parts(dpacked, norm_weight, key_dim)
    with without_autocast(packed):
        norm = GatedNormCall(h, gate, norm_weight, eps, "sigmoid", True)
        chosen, plan = select_norm(norm, True, "backward", "")
        dy = torch.zeros_like(h) if grad_y is None else grad_y.unflatten(-1, h.shape[2:])
        dh, _, dnorm = chosen.backward(plan, norm, dy, dgate)
        call = _call(q, k, v, g, beta, stabilizer, state, normalize)
        room, grads = GradRoom(*places), (dh, grad_final)
        found = matrix.write_gradients(room, call, cu_seqlens, "mlstm", backend, grads, (h, kept))
        *_, dg, dbeta, dstabilizer, dstate = found
        asked = (dg, dbeta, dstabilizer if normalize else None, grad_last)
        i, f = _open(gates, cap)
        di, df, dm = _gate_gradients(i, f, m, cu_seqlens, exponential, (g, beta), asked)
        dgates = torch.cat([di, df], -1)
        dgates = cap_gradient(gates, dgates, cap) if cap else dgates
        into_gates.copy_(dgates)
        unused.zero_()
        dbias = dgates.sum((0, 1)).to(gate_bias.dtype)
    found = (dpacked, dbias, dnorm, None if state is None else dstate, None if m is None else dm)
    return tuple(packed.new_empty(0) if x is None else x.contiguous() for x in found)


def _gate_gradients(
    i: Tensor,
    f: Tensor,
    m: Tensor | None,
    cu_seqlens: Tensor | None,
    exponential: bool,
    made: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of i, f and m. made: g and beta; grads: of g, beta, stabiliser and last m, None for 0."""
    wide = made[0].dtype
    if can_fuse(i, f, wide):
        di, df, dm = mlstm_gates.gradients(i, f, m, cu_seqlens, exponential, *made, *grads)
        return di, df, None if m is None else dm
    leaves = [i, f] if m is None else [i, f, m]

    def run(*given: Tensor) -> Any:
        return plain_gates(*given[:2], given[2] if m is not None else None, cu_seqlens, exponential, wide)

    di, df, *dm = vjp(run, leaves, grads)
    return di, df, dm[0] if dm else None


def _gradients_fake(
    grad_y, grad_final, grad_last, packed, gate_bias, norm_weight, state, m, g, beta, stabilizer, gates, h, kept,
    key_dim, exponential, normalize, cap, eps, cu_seqlens, backend,
):  # fmt: skip
    return tuple(
        packed.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (packed, gate_bias, norm_weight, state, m)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    kept = outputs[8]
    ctx.mark_non_differentiable(*outputs[3:])
    ctx.save_for_backward(*inputs[:5], inputs[10], *outputs[3:8], kept if kept.dim() > 1 else None)
    ctx.rest = inputs[5:10], inputs[12]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:5], saved[5], saved[6:]
    options, backend = ctx.rest
    found = mlstm_layer_backward(*grads[:3], *tensors, *kept, *options, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, found, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
mlstm_layer_backward = replayed_below(define("mlstm_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("mlstm_layer_forward", replayed_below(_forward), _forward_fake)
_differentiable = differentiable(_op, lambda *_: None, _backward, 5, _save, replayed_below(_op))
