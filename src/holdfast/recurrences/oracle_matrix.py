"""The matrix family, one step at a time: what every kernel of the family is checked against."""

import math

import torch
from torch import Tensor

from .definition import MatrixCall


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def matrix_steps(call: MatrixCall) -> tuple[Tensor, Tensor]:
    """Runs a call of equal-length sequences step by step, differentiably.

    Returns o [B, T, H, V] and the final state [B, H, K, V (+ 1 with stabilizer)], both in float32, or float64 for
    float64 inputs. The equations are MatrixCall's.
    """
    dtype = compute_dtype(call.v.dtype)
    v = call.v.to(dtype)
    batch, length, heads, _ = v.shape
    erase = call.k if call.e is None else call.e
    q, k, e = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (call.q, call.k, erase))
    decay = None if call.g is None else call.g.to(dtype).exp()
    if decay is not None and decay.dim() == 3:
        decay = decay[..., None]
    beta = None if call.beta is None else call.beta.to(dtype)[..., None]
    if call.stabilizer is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if call.initial_state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    else:
        state = call.initial_state.to(dtype)

    # taken apart at once: the gradient of each x[:, t] would be as large as x
    steps = zip(*([None] * length if x is None else x.unbind(1) for x in (q, k, e, v, decay, beta)), strict=True)
    outputs = []
    for query, key, erase, write, kept, strength in steps:
        before = state
        if kept is not None:
            state = kept[..., None] * state
        if call.delta:
            write = write - torch.einsum("bhkv,bhk->bhv", before if call.erase_before_decay else state, erase)
        if strength is not None:
            write = strength * write
        state = state + key[..., None] * write[:, :, None, :]
        outputs.append(call.scale * torch.einsum("bhkv,bhk->bhv", state, query))
    o = torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
    if call.stabilizer is not None:
        o = normalize(o, call.stabilizer.to(dtype), call.eps)
    return o, state


def whole_sequences(call: MatrixCall) -> tuple[Tensor, Tensor]:
    """`matrix_steps` of sequences that end with the call: the last m has its gradient of the final state too."""
    o, final = matrix_steps(call)
    m = call.stabilizer
    if m is None or not m.requires_grad or not m.shape[1]:
        return o, final
    return o, final / unit(m[:, -1].to(final.dtype))[..., None, None]


def normalize(o: Tensor, m: Tensor, eps: float) -> Tensor:
    """Divides o [..., V + 1], in units of exp(m), by its last column n . q: o[..., :V] / (max(|n . q|, exp(-m)) + eps).

    The gradient of m is MatrixCall's, but for the final state's part.
    """
    least = eps * unit(m) if m.requires_grad else eps
    return o[..., :-1] / (torch.maximum(o[..., -1].abs(), floor_of(m)) + least)[..., None]


def floor_of(m: Tensor) -> Tensor:
    """exp(-m), the least that an output is divided by, as a constant."""
    # past the largest exponential of the dtype the quotient is 0 to rounding, and inf would spoil its gradient
    return (-m.detach()).clamp_max(math.log(torch.finfo(m.dtype).max) - 1).exp()


def unit(m: Tensor) -> Tensor:
    """1 for each m, with the gradient of exp(m): what is measured in units of exp(m), as it is, becomes 1 of them."""
    # no gradient where m is infinite
    return (m - m.detach()).nan_to_num(0.0).exp()
