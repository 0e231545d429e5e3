"""fla.ops.linear_attn: no decay, and a sum of keys to divide by."""

import torch
from torch import Tensor

from holdfast import ops

from ..call import carried, refuse, run_op

# with normalize the state is that of the values and the sum of keys
State = Tensor | tuple[Tensor | None, Tensor] | None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> tuple[Tensor, State]:
    """`fused_recurrent_linear_attn`, with normalize by default."""
    return fused_recurrent_linear_attn(
        q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens, head_first=head_first
    )


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> tuple[Tensor, State]:
    """`chunk_linear_attn`."""
    return chunk_linear_attn(
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, head_first=head_first
    )


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> tuple[Tensor, State]:
    """`holdfast.linear_attention` of q, k [B, T, Hq, K], v [B, T, H, V]; normalize: divided by scale q . z + 1e-10, z
    the sum of keys up to the token.

    initial_state: [N, H, K, V], with normalize also a tuple of it and z [N, 1, H, K] of the tokens before.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state or None; with normalize (that, the last z), which is there
        without output_final_state too, as it is in fla.
    """
    refuse(head_first=head_first)
    z = None
    if normalize and isinstance(initial_state, tuple):
        initial_state, z = initial_state
    given = {"q": q, "k": k, "v": v, "scale": scale} | carried(q, initial_state, output_final_state, cu_seqlens)
    o, state = run_op(ops.linear_attention, given, reverse=reverse)
    if not normalize:
        return o, state
    wide, (heads, width) = torch.promote_types(k.dtype, torch.float32), k.shape[2:]
    x = k.flatten(2).to(wide)
    z = None if z is None else z.reshape(-1, heads * width)
    given = {"x": x, "g": torch.zeros_like(x)} | carried(x, z, True, cu_seqlens)
    sums, last = run_op(ops.hgrn, given, reverse=reverse)
    read = (q.to(wide) * sums.view(k.shape)).sum(-1, keepdim=True) * (width**-0.5 if scale is None else scale)
    divided = o / (read.repeat_interleave(v.shape[2] // heads, 2) + 1e-10)
    return divided.to(o.dtype), (state, last.view(-1, 1, heads, width))
