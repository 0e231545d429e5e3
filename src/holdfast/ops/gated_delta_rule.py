"""gated_delta_rule: Gated DeltaNet's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.gated_delta_rule import GATED_DELTA_RULE

from . import delta_rules
from .check import prepare
from .delta_inputs import fastest_inputs


@replayed
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet: S' = exp(g_t) S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, o_t = scale S_t^T q_t.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), eq. 10.

    Args:
        k: keys [B, T, Hq, K]; the recurrence is stable for beta |k|^2 <= 2, so keys are usually normalised to length 1.
            Keys expanded along T or K are computed in float32, those of float32 in float64, which has no kernel.
        g: natural-log decay, at most 0, [B, T, H] or constant [H]; any floating dtype.
        beta: write strength [B, T, H], 0 to 1, or to 2 for negative eigenvalues; any floating dtype.
        A_log, dt_bias: [H], any floating dtype. With A_log, g is a step size before its softplus, and the log decay is
            -exp(A_log) softplus(g + dt_bias), as in Mamba-2; dt_bias needs A_log.
        qk_l2norm: divides each query and key by sqrt(|.|^2 + 1e-6) first.
        beta_sigmoid: takes sigmoid(beta) as the write strength.
        allow_neg_eigval: doubles sigmoid(beta), so that a step may reflect the state (Grazzi et al. 2024,
            arXiv:2411.12537); needs beta_sigmoid.

    The other args, returns and errors are those of `simple_gla`: q [B, T, Hq, K], v [B, T, H, V], states float32
    [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    given = prepare(GATED_DELTA_RULE, cu_seqlens, arguments | {"initial_state": initial_state})
    options = {"qk_l2norm": qk_l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}
    options |= {"scale": scale, "inputs_of": fastest_inputs(given["q"])}
    return delta_rules.run(GATED_DELTA_RULE, given, options, k, output_final_state, cu_seqlens, backend)
