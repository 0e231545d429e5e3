"""rnn: any cell."""

from torch import Tensor

from holdfast.recurrences.cell import Cell
from holdfast.recurrences.dense import recurrence

from . import dense


def rnn(
    cell: Cell,
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
    """Any dense recurrence: g_t = x_t + R h_{t-1} + b, states = cell(states, g_t), with h the first state.

    Source: the cell's.

    Args:
        cell: what @holdfast.cell made of a function of (s, g); S, G, Gi and Gr count its states, gates, input gates and
            recurrent gates.
        x: the inputs' part of the gates [B, T, Gi, H, D], pre-activation, in the order of the cell's input.
        R: recurrent weights [Gr, H, D, D] (out, in), block-diagonal by head, of x's dtype, in the order of
            the cell's recurrent.
        b: bias [G, H, D] of x's dtype; None for none.
        initial_state: float32 [S, N, H, D] (float64 for float64 inputs); zeros by default. N is B, or the
            number of sequences with cu_seqlens.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1.
        reset: bool [B, T]; True zeroes the state before that step, as where an episode begins.
        recurrent_grad_clip: clips R^T dg, the gradient that reaches h through R, elementwise at each step; > 0.
        cut_recurrent_grad: whether to drop that gradient; R still gets its own.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h [B, T, H, D] in x's dtype, and the final state [S, N, H, D] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    if not isinstance(cell, Cell):
        raise TypeError(f"cell: expected a Cell, as holdfast.cell makes; got {type(cell).__name__}")
    return dense.run(
        recurrence(cell),
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
