"""lightning: Lightning attention, with one constant decay a head that weakens layer by layer."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.lightning import LIGHTNING
from holdfast.recurrences.scalars import integer

from . import matrix
from .check import prepare


@replayed
def lightning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int = 0,
    num_layers: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention: S_t = exp(-(8 h / H)(1 - layer / num_layers)) S_{t-1} + k_t v_t^T in head h.

    Source: Qin et al. 2024, Lightning Attention-2 (arXiv:2401.04658), with the decay of TransNormerLLM
    (arXiv:2307.14995).

    Args:
        layer, num_layers: this layer's number from 0, and how many there are; TypeError unless integers, ValueError
            unless layer < num_layers.

    The other args, returns and errors are those of `simple_gla` without g: q, k [B, T, Hq, K], v [B, T, H, V], states
    float32 [N, H, K, V]; returns o = scale S_t^T q_t, [B, T, H, V], and the final state or None.
    """
    if not 0 <= integer("layer", layer) < integer("num_layers", num_layers):
        raise ValueError(f"layer: expected 0 <= layer < num_layers = {num_layers}; got {layer}")
    given = prepare(LIGHTNING, cu_seqlens, {"q": q, "k": k, "v": v, "initial_state": initial_state})
    mapped = LIGHTNING.map(**given, layer=layer, num_layers=num_layers, scale=scale)
    return matrix.run(LIGHTNING, mapped, output_final_state, cu_seqlens, backend)
