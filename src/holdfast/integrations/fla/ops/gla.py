"""fla.ops.gla: a decay a key channel."""

from torch import Tensor

from holdfast import ops

from ..call import Result, carried, refuse, run_op


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.gla` with g [B, T, H, K]."""
    refuse(head_first=head_first)
    given = {"q": q, "k": k, "v": v, "g": g, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    return run_op(ops.gla, given, state_v_first)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.gla` with gk [B, T, H, K], or without a decay; reverse: from the last token to the first."""
    refuse(head_first=head_first, gv=gv)
    given = {"q": q, "k": k, "v": v, "g": gk, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    return run_op(ops.simple_gla if gk is None else ops.gla, given, state_v_first, reverse)


def fused_chunk_gla(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    head_first: bool = False,
) -> Result:
    """`chunk_gla`, to which fla itself points where its newer versions raise an error."""
    return chunk_gla(q, k, v, g, scale, initial_state, output_final_state, head_first=head_first)
