"""The matrix family, one step at a time: what every kernel of the family is checked against."""

import torch
from torch import Tensor

from .definition import MatrixCall


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def matrix_steps(call: MatrixCall) -> tuple[Tensor, Tensor]:
    """Runs a call of equal-length sequences step by step, differentiably.

    Returns o [B, T, H, V] and the final state [B, H, K, V (+ 1 with norm_floor)], both in float32, or float64 for
    float64 inputs. The equations are MatrixCall's.
    """
    dtype = compute_dtype(call.v.dtype)
    v = call.v.to(dtype)
    batch, length, heads, _ = v.shape
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (call.q, call.k))
    decay = None if call.g is None else call.g.to(dtype).exp()
    if decay is not None and decay.dim() == 3:
        decay = decay[..., None]
    beta = None if call.beta is None else call.beta.to(dtype)[..., None]
    if call.norm_floor is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if call.initial_state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    else:
        state = call.initial_state.to(dtype)

    # taken apart at once: the gradient of each x[:, t] would be as large as x
    steps = zip(*([None] * length if x is None else x.unbind(1) for x in (q, k, v, decay, beta)), strict=True)
    outputs = []
    for query, key, write, kept, strength in steps:
        if kept is not None:
            state = kept[..., None] * state
        if call.delta:
            write = write - torch.einsum("bhkv,bhk->bhv", state, key)
        if strength is not None:
            write = strength * write
        state = state + key[..., None] * write[:, :, None, :]
        outputs.append(call.scale * torch.einsum("bhkv,bhk->bhv", state, query))
    o = torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
    if call.norm_floor is not None:
        o = normalize(o, call.norm_floor.to(dtype), call.eps)
    return o, state


def normalize(o: Tensor, norm_floor: Tensor, eps: float) -> Tensor:
    """Divides o [..., V + 1] by its last column n . q: o[..., :V] / (max(|n . q|, norm_floor) + eps)."""
    return o[..., :-1] / (torch.maximum(o[..., -1].abs(), norm_floor) + eps)[..., None]
