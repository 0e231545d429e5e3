"""What the dense recurrences share: the shapes of their arguments, their mapping onto the family, their examples."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .cell import Cell
from .definition import Argument, DenseCall, Recurrence
from .example import Draw, Sizes

ARGUMENTS = {
    "x": Argument("the inputs' part of the gates, pre-activation", "B T input_gates H D"),
    "R": Argument("recurrent weights, a D x D matrix (out, in) for each gate and head", "recurrent_gates H D D"),
    "b": Argument("bias of the gates", "gates H D", required=False),
    "initial_state": Argument("states before the first step", "states sequences H D", "state", required=False),
    "reset": Argument("True where the states are zeroed before the step", "B T", "bool", required=False),
}


def sizes(cell: Cell) -> Mapping[str, int]:
    """The axes that a cell fixes."""
    return {
        "states": len(cell.states),
        "gates": len(cell.gates),
        "input_gates": len(cell.input),
        "recurrent_gates": len(cell.recurrent),
    }


def mapping(cell: Cell) -> Callable[..., tuple[DenseCall, None]]:
    """Arguments as the definition names them, for one cell."""

    def map_call(
        x: Tensor,
        R: Tensor,
        b: Tensor | None = None,
        initial_state: Tensor | None = None,
        reset: Tensor | None = None,
        recurrent_grad_clip: float | None = None,
        cut_recurrent_grad: bool = False,
    ) -> tuple[DenseCall, None]:
        return DenseCall(cell, x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad), None

    return map_call


def example(cell: Cell) -> Callable[[Draw, Sizes], dict[str, Any]]:
    """Arguments for one cell, the recurrent weights of torch.nn's scale."""

    def draw_call(draw: Draw, sizes: Sizes) -> dict[str, Any]:
        B, T, H, D = sizes.B, sizes.T, sizes.H, sizes.D
        return {
            "x": draw.normal(B, T, len(cell.input), H, D),
            "R": draw.normal(len(cell.recurrent), H, D, D, scale=(3 * D) ** -0.5),
            "b": draw.normal(len(cell.gates), H, D),
            "initial_state": draw.state(len(cell.states), B, H, D),
        }

    return draw_call


def recurrence(cell: Cell) -> Recurrence:
    """The definition that a cell of a user's own amounts to."""
    return Recurrence(
        name=cell.name,
        family="dense",
        title=cell.name,
        equation=f"g_t = x_t + R {cell.states[0]}_{{t-1}} + b;  s_t = {cell.name}(s_{{t-1}}, g_t)",
        paper="",
        arguments=ARGUMENTS,
        map=mapping(cell),
        example=example(cell),
    )
