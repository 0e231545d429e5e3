"""retnet: retention, with one constant decay a head."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.retnet import RETNET

from . import matrix
from .check import prepare


@replayed
def retnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention: S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T in head h, o_t = scale S_t^T q_t.

    Source: Sun et al. 2023, Retentive Network (arXiv:2307.08621), eq. 8. The rotation of q and k is the caller's.

    Args, returns and errors are those of `simple_gla` without g: q, k [B, T, Hq, K], v [B, T, H, V], states float32
    [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    given = prepare(RETNET, cu_seqlens, {"q": q, "k": k, "v": v, "initial_state": initial_state})
    return matrix.run(RETNET, RETNET.map(**given, scale=scale), output_final_state, cu_seqlens, backend)
