"""linear_attention: an outer-product state without decay."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.linear_attention import LINEAR_ATTENTION

from . import matrix
from .check import prepare


@replayed
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention, without feature map and normaliser: S_t = S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

    Source: Katharopoulos et al. 2020, Transformers are RNNs (arXiv:2006.16236).

    Args, returns and errors are those of `simple_gla` without g: q, k [B, T, Hq, K], v [B, T, H, V], states float32
    [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    given = prepare(LINEAR_ATTENTION, cu_seqlens, {"q": q, "k": k, "v": v, "initial_state": initial_state})
    mapped = LINEAR_ATTENTION.map(**given, scale=scale)
    return matrix.run(LINEAR_ATTENTION, mapped, output_final_state, cu_seqlens, backend)
