"""rglru: the linear scan with real gates."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.rglru import RGLRU

from . import diagonal
from .check import prepare


@replayed
def rglru(
    a: Tensor,
    x: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Real-gated linear recurrent unit, the scan alone: h_t = a_t h_{t-1} + x_t, channel by channel.

    Source: De et al. 2024, Griffin (arXiv:2402.19427), eq. 4, whose gates `nn.RGLRU` computes.

    Args:
        a: gates [B, T, D], any real numbers, negative and zero too, any floating dtype. Gates near 1 want float32: in
            bfloat16 there is no number between 0.996 and 1.
        x: inputs [B, T, D], whose dtype is the output's.
        initial_state: float32 [N, D] (float64 for float64 x); zeros by default. N is B, or the number of sequences with
            cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h [B, T, D] in x's dtype, and the final state [N, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    given = prepare(RGLRU, cu_seqlens, {"x": x, "a": a, "initial_state": initial_state})
    return diagonal.run(RGLRU, RGLRU.map(**given), output_final_state, cu_seqlens, backend)
