"""hgrn: the linear scan with log decays."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.hgrn import HGRN

from . import diagonal
from .check import prepare


@replayed
def hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Hierarchically gated recurrence, the scan alone: h_t = exp(g_t) h_{t-1} + x_t, channel by channel.

    Source: Qin et al. 2023, Hierarchically Gated Recurrent Neural Network (arXiv:2311.04823); arguments as in
    flash-linear-attention.

    Args:
        x: inputs [B, T, D], whose dtype is the output's.
        g: natural-log decay [B, T, D], at most 0 (minus infinity forgets all), any floating dtype.
        initial_state: float32 [N, D] (float64 for float64 x); zeros by default.
        output_final_state, cu_seqlens, backend: as in `rglru`.

    Returns:
        h [B, T, D] in x's dtype, and the final state [N, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    given = prepare(HGRN, cu_seqlens, {"x": x, "g": g, "initial_state": initial_state})
    return diagonal.run(HGRN, HGRN.map(**given), output_final_state, cu_seqlens, backend)
