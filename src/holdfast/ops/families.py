"""The op, the backends and the problem of a recurrence, found by its name."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from holdfast import ops
from holdfast.kernels.backend import Backend
from holdfast.planner import Problem
from holdfast.recurrences import Recurrence

from . import dense, diagonal, matrix, selective

_FAMILIES: dict[str, ModuleType] = {"dense": dense, "diagonal": diagonal, "matrix": matrix, "selective": selective}


def op_of(recurrence: Recurrence) -> Callable[..., tuple[Tensor, Any]]:
    """The public function: of tensors of the shapes and dtypes that recurrence.arguments names, which it checks."""
    return getattr(ops, recurrence.name)


def backends_of(recurrence: Recurrence) -> tuple[Backend, ...]:
    """Its backends, in the order in which they are tried."""
    return _FAMILIES[recurrence.family].BACKENDS


def problem_of(recurrence: Recurrence, arguments: dict[str, Any], cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """The problem that a call with these arguments poses.

    arguments: checked ones, of the shapes and dtypes that recurrence.arguments names; on the meta device too, since no
    values are read. cu_seqlens: int32 or int64 [N + 1], or None. grad: whether a backward pass may follow.
    """
    call, _ = recurrence.map(**arguments)
    return _FAMILIES[recurrence.family].problem(recurrence.name, call, cu_seqlens, grad)
