"""fla.ops.simple_gla: a decay a head, for each token or constant."""

from torch import Tensor

from holdfast import ops

from ..call import Result, carried, no_attentions, refuse, run_op


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool = False,
) -> Result:
    """`holdfast.simple_gla` with g [B, T, H] or g_gamma [H]."""
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens,
        head_first=head_first,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.simple_gla` with g [B, T, H] or g_gamma [H]; reverse: from the last token to the first."""
    refuse(head_first=head_first)
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: expected None beside g, in whose place it is; got a tensor")
    given = {"q": q, "k": k, "v": v, "g": g if g_gamma is None else g_gamma, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    return run_op(ops.simple_gla, given, state_v_first, reverse)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.simple_gla` with g [B, T, H] or g_gamma [H]."""
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, head_first=head_first
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.simple_gla` with g [B, T, H], from no state, in time linear in T; None is in the scores' place."""
    no_attentions(output_attentions)
    return chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, head_first=head_first)
