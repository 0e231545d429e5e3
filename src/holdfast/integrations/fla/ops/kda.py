"""fla.ops.kda: Kimi Delta Attention."""

from torch import Tensor

from holdfast import ops

from ..arguments import kda_arguments
from ..call import Result, named_as, run_op

chunk_kda = named_as(__name__, "chunk_kda", ops.kda, kda_arguments)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.kda` with g [B, T, HV, K] and beta [B, T, HV]; gradients are recorded, as they are not there."""
    given, turned = kda_arguments(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, head_first=head_first,
    )  # fmt: skip
    return run_op(ops.kda, given, turned)
