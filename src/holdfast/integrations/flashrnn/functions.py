"""flashrnn's functions as Holdfast's ops: which gates each has, and in which order they stand there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast import ops

from .later_states import lstm_states, slstm_states


@dataclass(frozen=True)
class Function:
    """One of flashrnn's functions.

    op: Holdfast's. states, input_gates, recurrent_gates, gates: how many there are of each. first_is_last: whether the
    first gate of R and of b, there, is the last one here, as GRU's recurrent part of the candidate is.
    later_states: what finds the states beside h at every token; None where h is the only one.
    """

    op: Callable[..., tuple[Tensor, Tensor | None]]
    states: int
    input_gates: int
    recurrent_gates: int
    gates: int
    first_is_last: bool = False
    later_states: Callable[..., tuple[Tensor, ...]] | None = None

    def weights(self, R: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """R [recurrent_gates, ...] and b [gates, ...] in the op's order."""
        return (R.roll(-1, 0), b.roll(-1, 0)) if self.first_is_last else (R, b)


FUNCTIONS = {
    "lstm": Function(ops.lstm, 2, 4, 4, 4, later_states=lstm_states),
    "gru": Function(ops.gru, 1, 3, 3, 4, first_is_last=True),
    "elman": Function(ops.elman, 1, 1, 1, 1),
    "slstm": Function(ops.slstm, 4, 4, 4, 4, later_states=slstm_states),
}


def function_named(name: Any) -> Function:
    """Raises ValueError for another name."""
    if name not in FUNCTIONS:
        raise ValueError(f"function: expected one of {', '.join(map(repr, FUNCTIONS))}; got {name!r}")
    return FUNCTIONS[name]
