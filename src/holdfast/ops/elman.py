"""elman: the simple recurrent network."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.elman import CELLS, ELMAN, Nonlinearity

from . import dense


@replayed
def elman(
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
    nonlinearity: Nonlinearity = "tanh",
) -> tuple[Tensor, Tensor | None]:
    """Elman network: h_t = tanh(x_t + R h_{t-1} + b), or relu for tanh.

    Source: Elman 1990, Finding Structure in Time (doi:10.1207/s15516709cog1402_1).

    Args:
        x: the inputs' part of the pre-activation [B, T, 1, H, D].
        R: recurrent weights [1, H, D, D] (out, in), block-diagonal by head, of x's dtype.
        b: bias [1, H, D] of x's dtype; None for none.
        initial_state: float32 [1, N, H, D] (float64 for float64 inputs); zeros by default. N is B, or the
            number of sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        reset: bool [B, T]; True zeroes the state before that step, as where an episode begins.
        recurrent_grad_clip: clips R^T dg, the gradient that reaches h through R, elementwise at each step; > 0.
        cut_recurrent_grad: whether to drop that gradient; R still gets its own.
        backend: forces a backend by name; by default the first that can serve the call.
        nonlinearity: "tanh" or "relu".

    Returns:
        h [B, T, H, D] in x's dtype, and the final state [1, N, H, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    if nonlinearity not in CELLS:
        raise ValueError(f"nonlinearity: expected one of {', '.join(map(repr, CELLS))}; got {nonlinearity!r}")
    return dense.run(
        ELMAN,
        CELLS[nonlinearity],
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
