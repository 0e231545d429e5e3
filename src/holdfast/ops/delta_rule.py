"""delta_rule: DeltaNet's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.delta_rule import DELTA_RULE

from . import delta_rules
from .check import prepare
from .delta_inputs import fastest_inputs


@replayed
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t.

    Source: Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule (arXiv:2406.06484), eq. 2.

    Args:
        k: keys [B, T, Hq, K]; the recurrence is stable for beta |k|^2 <= 2, so keys are usually normalised to length 1.
            Keys expanded along T or K are computed in float32, those of float32 in float64, which has no kernel.
        beta: write strength [B, T, H], 0 to 1, or to 2 for negative eigenvalues; any floating dtype.
        qk_l2norm: divides each query and key by sqrt(|.|^2 + 1e-6) first.
        beta_sigmoid: takes sigmoid(beta) as the write strength.
        allow_neg_eigval: doubles sigmoid(beta), so that a step may reflect the state (Grazzi et al. 2024,
            arXiv:2411.12537); needs beta_sigmoid.

    The other args, returns and errors are those of `simple_gla` without g: q [B, T, Hq, K], v [B, T, H, V], states
    float32 [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    given = prepare(DELTA_RULE, cu_seqlens, {"q": q, "k": k, "v": v, "beta": beta, "initial_state": initial_state})
    options = {"qk_l2norm": qk_l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}
    options |= {"scale": scale, "inputs_of": fastest_inputs(given["q"])}
    return delta_rules.run(DELTA_RULE, given, options, k, output_final_state, cu_seqlens, backend)
