"""Runs any recurrence step by step from its definition: what ops, modules and kernels are checked against."""

from typing import Any

import torch
from torch import Tensor

from .definition import Argument, DenseCall, DiagonalCall, MatrixCall, Recurrence, SelectiveCall
from .oracle_dense import dense_steps
from .oracle_diagonal import diagonal_steps
from .oracle_matrix import whole_sequences
from .oracle_selective import selective_steps

_STEPS = {
    DenseCall: dense_steps,
    MatrixCall: whole_sequences,
    DiagonalCall: diagonal_steps,
    SelectiveCall: selective_steps,
}


def oracle(recurrence: Recurrence, arguments: dict[str, Any], cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """(output, final state) of the recurrence, differentiable, in float64 for float64 arguments.

    arguments: the op's, without output_final_state, cu_seqlens and backend. Packed sequences run one by one.
    """
    if cu_seqlens is None:
        call, finish = recurrence.map(**arguments)
        o, final_state = _STEPS[type(call)](call)
        return (o, final_state) if finish is None else finish(o, final_state)
    bounds = cu_seqlens.tolist()
    parts = [_sequence(recurrence, arguments, n, *bounds[n : n + 2]) for n in range(len(bounds) - 1)]
    outputs, states = zip(*(oracle(recurrence, part) for part in parts), strict=True)
    return torch.cat(outputs, 1), _join(states, recurrence.arguments["initial_state"])


def _sequence(recurrence: Recurrence, arguments: dict[str, Any], n: int, start: int, end: int) -> dict[str, Any]:
    def cut(x: Any, argument: Argument | tuple[Argument, ...] | None) -> Any:
        if isinstance(argument, tuple):
            return None if x is None else tuple(cut(part, spec) for part, spec in zip(x, argument, strict=True))
        if not isinstance(x, Tensor) or argument is None:
            return x
        axes = next(shape.split() for shape in argument.shapes if len(shape.split()) == x.dim())
        if "T" in axes:
            x = x.narrow(axes.index("T"), start, end - start)
        return x.narrow(axes.index("sequences"), n, 1) if "sequences" in axes else x

    return {name: cut(x, recurrence.arguments.get(name)) for name, x in arguments.items()}


def _join(states: tuple[Any, ...], argument: Argument | tuple[Argument, ...]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_join(part, spec) for part, spec in zip(zip(*states, strict=True), argument, strict=True))
    return torch.cat(states, argument.shapes[0].split().index("sequences"))
