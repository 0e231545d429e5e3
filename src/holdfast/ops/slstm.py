"""slstm: LSTM with exponential gates."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.slstm import SLSTM
from holdfast.recurrences.slstm import slstm as cell

from . import dense


@replayed
def slstm(
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
    """sLSTM: i, f, z, o = x_t + R h + b; with m' = max(logsigmoid(f) + m, i), or i while n is 0,
    c = exp(logsigmoid(f) + m - m') c + exp(i - m') tanh(z), n likewise with 1 for tanh(z), h = sigmoid(o) c / n.

    Source: Beck et al. 2024, xLSTM (arXiv:2405.04517).

    Args:
        x: the inputs' part of the gates i, f, z, o [B, T, 4, H, D], pre-activation.
        R: recurrent weights [4, H, D, D] (out, in), block-diagonal by head, of x's dtype.
        b: bias [4, H, D] of x's dtype; None for none.
        initial_state: float32 [4, N, H, D] (float64 for float64 inputs), h, c, n and m; zeros by default. N is B, or
            the number of sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        reset: bool [B, T]; True zeroes the state before that step, as where an episode begins.
        recurrent_grad_clip: clips R^T dg, the gradient that reaches h through R, elementwise at each step; > 0.
        cut_recurrent_grad: whether to drop that gradient; R still gets its own.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h [B, T, H, D] in x's dtype, and the final state [4, N, H, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    return dense.run(
        SLSTM,
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
