"""kda: Kimi Delta Attention's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.kda import KDA

from . import delta_rules
from .check import prepare
from .delta_inputs import fastest_inputs
from .kda_gate import fastest_log_decay


@replayed
def kda(
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
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA: S' = diag(exp(g_t)) S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, o_t = scale S_t^T q_t.

    Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692), eq. 1.

    Args:
        g: natural-log decay of each key channel, at most 0, [B, T, H, K]; any floating dtype.
        A_log, dt_bias: [H] and [H, K], any floating dtype. With A_log, g is what the gate takes, and the log decay is
            -exp(A_log) softplus(g + dt_bias).
        lower_bound: a number below 0. With it the log decay is lower_bound sigmoid(exp(A_log) (g + dt_bias)), never
            below the bound; without A_log, lower_bound sigmoid(g + dt_bias).

    The other args, returns and errors are those of `gated_delta_rule`: q, k [B, T, Hq, K], v [B, T, H, V], beta
    [B, T, H], states float32 [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    given = prepare(KDA, cu_seqlens, arguments | {"initial_state": initial_state})
    options = {"qk_l2norm": qk_l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}
    options |= {"inputs_of": fastest_inputs(given["q"]), "decay_of": fastest_log_decay(given["g"])}
    options |= {"scale": scale, "lower_bound": lower_bound}
    return delta_rules.run(KDA, given, options, k, output_final_state, cu_seqlens, backend)
