"""rotlru: the linear scan with gates that turn pairs of channels."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.rotlru import ROTLRU

from . import diagonal
from .check import prepare


@replayed
def rotlru(
    a: Tensor,
    theta: Tensor,
    x: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotational linear recurrent unit: h_t = a_t e^(i theta_t) h_{t-1} + x_t, pair by pair.

    Channels 2j and 2j + 1 of x, h and the states are the real and the imaginary part of pair j.

    Source: Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences (arXiv:2303.06349),
    here with a magnitude and an angle a step.

    Args:
        a: magnitudes [B, T, D/2], any real numbers, any floating dtype.
        theta: angles [B, T, D/2] in radians, any floating dtype.
        x: inputs [B, T, D], D even, whose dtype is the output's.
        initial_state: float32 [N, D] (float64 for float64 x), pairs interleaved as in x; zeros by default.
        output_final_state, cu_seqlens, backend: as in `rglru`.

    Returns:
        h [B, T, D] in x's dtype, and the final state [N, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, or an odd D, named in the message;
            for a backend that is unknown or cannot serve the call.
    """
    given = prepare(ROTLRU, cu_seqlens, {"x": x, "a": a, "theta": theta, "initial_state": initial_state})
    return diagonal.run(ROTLRU, ROTLRU.map(**given), output_final_state, cu_seqlens, backend)
