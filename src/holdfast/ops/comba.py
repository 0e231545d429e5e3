"""comba: Comba's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.comba import COMBA

from . import delta_rules
from .check import prepare


@replayed
def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Comba: S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T, o_t = scale S_t^T q_t.

    Source: Hu et al. 2025 (arXiv:2506.02475). p reads the state before its decay. What the paper's layer does to its
    queries, q - d p, is left to the caller.

    Args:
        p: erase keys, [B, T, Hq, K], of the inputs' dtype.
        g: natural-log decay, at most 0, [B, T, H]; any floating dtype.
        beta: strength of erase and write, [B, T, H], any floating dtype; 1 by default.
        qk_l2norm: divides q, k and p by sqrt(sum(x^2) + 1e-6) over K.

    The other args, returns and errors are those of `gated_delta_rule`: q, k [B, T, Hq, K], v [B, T, H, V], states
    float32 [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    arguments = {"q": q, "k": k, "v": v, "p": p, "g": g, "beta": beta, "initial_state": initial_state}
    given = prepare(COMBA, cu_seqlens, arguments)
    options = {"scale": scale, "qk_l2norm": qk_l2norm}
    return delta_rules.run(COMBA, given, options, k, output_final_state, cu_seqlens, backend)
