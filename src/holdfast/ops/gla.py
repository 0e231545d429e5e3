"""gla: gated linear attention with one decay a key channel."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.gla import GLA

from . import matrix
from .check import prepare


@replayed
def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), eq. 4.

    Args:
        g: natural-log decay of each key channel, at most 0, [B, T, H, K], any floating dtype.

    The other args, returns and errors are those of `simple_gla`: q, k [B, T, Hq, K], v [B, T, H, V], states float32
    [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    given = prepare(GLA, cu_seqlens, {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state})
    return matrix.run(GLA, GLA.map(**given, scale=scale), output_final_state, cu_seqlens, backend)
