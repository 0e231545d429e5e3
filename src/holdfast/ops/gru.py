"""gru: gated recurrent unit."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.gru import GRU
from holdfast.recurrences.gru import gru as cell

from . import dense


@replayed
def gru(
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
    """GRU with the reset gate after the product, as torch.nn.GRU has it:

    r, z = x_t + R h + b, n = x_t + b, m = R h + b, h = (1 - sigmoid(z)) tanh(n + sigmoid(r) m) + sigmoid(z) h.

    Source: Cho et al. 2014 (arXiv:1406.1078); reset after the product: Chetlur et al. 2014, cuDNN (arXiv:1410.0759).

    Args:
        x: the inputs' part of the gates r, z, n [B, T, 3, H, D], pre-activation.
        R: recurrent weights [3, H, D, D] (out, in), block-diagonal by head, of x's dtype, for r, z, m.
        b: bias [4, H, D] of x's dtype, for r, z, n, m; None for none.
        initial_state: float32 [1, N, H, D] (float64 for float64 inputs); zeros by default. N is B, or the
            number of sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        reset: bool [B, T]; True zeroes the state before that step, as where an episode begins.
        recurrent_grad_clip: clips R^T dg, the gradient that reaches h through R, elementwise at each step; > 0.
        cut_recurrent_grad: whether to drop that gradient; R still gets its own.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h [B, T, H, D] in x's dtype, and the final state [1, N, H, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    return dense.run(
        GRU,
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
