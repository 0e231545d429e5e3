"""simple_gla: gated linear attention with one decay a head."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.simple_gla import SIMPLE_GLA

from . import matrix
from .check import prepare


@replayed
def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple gated linear attention: S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), with one decay a head.

    Args:
        q, k: queries and keys [B, T, Hq, K]; query head j serves value heads j H / Hq to (j + 1) H / Hq - 1.
        v: values [B, T, H, V], of q's dtype.
        g: natural-log decay, at most 0, [B, T, H] or constant [H], any floating dtype; None for no decay.
        scale: factor on the output; K ** -0.5 by default.
        initial_state: float32 [N, H, K, V] (float64 for float64 inputs); zeros by default. N is B, or the number of
            sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    given = prepare(SIMPLE_GLA, cu_seqlens, {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state})
    return matrix.run(SIMPLE_GLA, SIMPLE_GLA.map(**given, scale=scale), output_final_state, cu_seqlens, backend)
