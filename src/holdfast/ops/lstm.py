"""lstm: long short-term memory."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.lstm import LSTM
from holdfast.recurrences.lstm import lstm as cell

from . import dense


@replayed
def lstm(
    x: Tensor,
    R: Tensor,
    b: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    recurrent_grad_clip: float | None = None,
    cut_recurrent_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """LSTM: i, f, z, o = x_t + R h + b, c = sigmoid(f) c + sigmoid(i) tanh(z), h = sigmoid(o) tanh(c).

    Source: Hochreiter and Schmidhuber 1997 (doi:10.1162/neco.1997.9.8.1735); forget gate: Gers et al. 2000.

    Args:
        x: the inputs' part of the gates i, f, z, o [B, T, 4, H, D], pre-activation.
        R: recurrent weights [4, H, D, D] (out, in), block-diagonal by head, of x's dtype.
        b: bias [4, H, D] of x's dtype; None for none.
        initial_state: float32 [2, N, H, D] (float64 for float64 inputs), h and c; zeros by default. N is B, or the
            number of sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        reset: bool [B, T]; True zeroes the state before that step, as where an episode begins.
        recurrent_grad_clip: clips R^T dg, the gradient that reaches h through R, elementwise at each step; > 0.
        cut_recurrent_grad: whether to drop that gradient; R still gets its own.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h [B, T, H, D] in x's dtype, and the final state [2, N, H, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    return dense.run(
        LSTM,
        cell,
        x,
        R,
        b,
        initial_state,
        output_final_state,
        cu_seqlens,
        reset,
        recurrent_grad_clip,
        cut_recurrent_grad,
        backend,
    )
