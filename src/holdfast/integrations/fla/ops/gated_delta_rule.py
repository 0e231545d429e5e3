"""fla.ops.gated_delta_rule: Gated DeltaNet, its decay a head's or a key channel's."""

from torch import Tensor

from holdfast import ops

from ..arguments import gated_delta_rule_arguments, kda_arguments
from ..call import Result, named_as, refuse, run_op
from .delta_rule import full_strength

chunk_gated_delta_rule = named_as(__name__, "chunk_gated_delta_rule", ops.gated_delta_rule, gated_delta_rule_arguments)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.gated_delta_rule` with g [B, T, HV], `holdfast.kda` with gk [B, T, HV, K] or with both, which add up,
    `holdfast.delta_rule` with neither; beta [B, T, HV] is 1 by default."""
    refuse(head_first=head_first, gv=gv)
    if use_gate_in_kernel and (g is None or gk is not None):
        raise ValueError("use_gate_in_kernel: expected g without gk beside it, since the gate is g's; got others")
    # of older versions beta has its place
    if gk is not None and (gk.dim() != 4 or gk.shape[3] != q.shape[3]):
        raise ValueError(f"gk: expected shape [B, T, HV, K={q.shape[3]}]; got {list(gk.shape)}")
    beta = full_strength(v) if beta is None else beta
    shared = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if gk is not None:
        return run_op(ops.kda, *kda_arguments(q, k, v, gk if g is None else g[..., None] + gk, beta, **shared))
    shared |= {"use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias}
    given, turned = gated_delta_rule_arguments(q, k, v, g, beta, **shared)
    if g is None:
        del given["g"]
        return run_op(ops.delta_rule, given, turned)
    return run_op(ops.gated_delta_rule, given, turned)


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
