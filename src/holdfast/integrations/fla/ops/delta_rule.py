"""fla.ops.delta_rule: DeltaNet."""

from torch import Tensor

from holdfast import ops

from ..arguments import options
from ..call import Result, carried, refuse, run_op


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    head_first: bool = False,
) -> Result:
    """`holdfast.delta_rule` with beta [B, T, H]."""
    refuse(head_first=head_first)
    given = {"q": q, "k": k, "v": v, "beta": beta, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens)
    return run_op(ops.delta_rule, given | options(use_qk_l2norm_in_kernel, False, False))


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.delta_rule` with beta [B, T, H], by default 1."""
    beta = full_strength(v) if beta is None else beta
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        head_first=head_first,
    )  # fmt: skip


def fused_chunk_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    head_first: bool = False,
) -> Result:
    """`chunk_delta_rule`, to which fla itself points where its newer versions raise an error."""
    return chunk_delta_rule(q, k, v, beta, scale, initial_state, output_final_state, head_first=head_first)


def full_strength(v: Tensor) -> Tensor:
    """Write strengths of 1 [B, T, H] beside v [B, T, H, V]."""
    return v.new_ones(v.shape[:3])
