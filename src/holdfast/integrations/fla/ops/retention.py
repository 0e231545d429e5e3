"""fla.ops.retention: a constant decay a head."""

from torch import Tensor

from holdfast import ops

from ..call import Result, carried, no_attentions, refuse, run_op


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool = False,
) -> Result:
    """`holdfast.retnet`."""
    return fused_recurrent_retention(
        q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, head_first=head_first
    )


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.retnet`; reverse: from the last token to the first."""
    refuse(head_first=head_first)
    given = {"q": q, "k": k, "v": v, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    return run_op(ops.retnet, given, state_v_first, reverse)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.retnet`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens, head_first=head_first)


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.retnet`, from no state, in time linear in T; None is in the scores' place."""
    no_attentions(output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens, head_first=head_first)
