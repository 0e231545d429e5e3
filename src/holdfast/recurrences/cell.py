"""A cell: the pointwise function that takes one step of a dense recurrence, written by us or by a user."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from . import trace
from .torch_private import own_graph


class Named:
    """Tensors as attributes: s.h, g.f."""

    def __init__(self, cell: str, kind: str, names: Sequence[str], values: Sequence[Tensor]) -> None:
        self.__dict__.update(zip(names, values, strict=True))
        self._owner, self._kind, self._names = cell, kind, names

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"cell {self._owner!r} has no {self._kind} {name!r}; it has {', '.join(self._names)}")


@dataclass(frozen=True, eq=False)
class Cell:
    """One step s_t = function(s_{t-1}, g_t), pointwise, with g_t = x_t + R h_{t-1} + b and h the first state.

    name: of the function. states, gates: names in the order in which state tensors and b stack them. input, recurrent:
    the gates that x and R stack, in that order; a gate in only one of them lacks the other's part. function: takes s
    and g, whose attributes are the states before the step and the gates, and returns a dict of the states after it.
    key: what custom ops know the cell by, unique in the process.
    """

    name: str
    states: tuple[str, ...]
    gates: tuple[str, ...]
    input: tuple[str, ...]
    recurrent: tuple[str, ...]
    function: Callable[[Any, Any], dict[str, Tensor]]
    key: str

    def step(self, states: Sequence[Tensor], gates: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The states after one step, in order. Raises TypeError or ValueError unless the function returns those."""
        result = self.function(
            Named(self.name, "state", self.states, states), Named(self.name, "gate", self.gates, gates)
        )
        if not isinstance(result, dict):
            raise TypeError(f"cell {self.name!r}: expected a dict of its states; got {type(result).__name__}")
        missing, extra = set(self.states) - set(result), set(result) - set(self.states)
        if missing or extra:
            problems = [f"missing {', '.join(sorted(missing))}"] if missing else []
            problems += [f"unknown {', '.join(sorted(map(str, extra)))}"] if extra else []
            expected = ", ".join(self.states)
            raise ValueError(f"cell {self.name!r}: expected the states {expected} returned; got {'; '.join(problems)}")
        for state in self.states:
            if not isinstance(result[state], Tensor):
                found = type(result[state]).__name__
                raise TypeError(f"cell {self.name!r}: expected a tensor for state {state!r}; got {found}")
        return tuple(result[state] for state in self.states)

    def forward_graph(self, dtype: torch.dtype) -> fx.Graph:
        """The step as a graph of pointwise ATen operations.

        Placeholders are s_<state> and g_<gate>, in order; the output is the tuple of new states.
        """
        return _forward_graph(self, dtype)

    def backward_graph(self, dtype: torch.dtype) -> fx.Graph:
        """The step's vector-Jacobian product as a graph of pointwise ATen operations.

        Placeholders are s_<state>, g_<gate> and d_<state>, the gradients of the new states; the output is the tuple of
        gradients of the old states and of the gates.
        """
        return _backward_graph(self, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.function.__module__, self.key)


_CELLS: dict[str, Cell] = {}


def cell(
    *,
    states: Sequence[str],
    gates: Sequence[str],
    input: Sequence[str] | None = None,
    recurrent: Sequence[str] | None = None,
) -> Callable[[Callable[[Any, Any], dict[str, Tensor]]], Cell]:
    """Turns a pointwise function (s, g) -> dict of states into a Cell.

    Args:
        states: names of the states; the first is the output, and what R multiplies.
        gates: names of the gates.
        input: the gates that take x, in x's order; by default all.
        recurrent: the gates that take R h, in R's order; by default all.

    Raises:
        ValueError, TypeError: for names that are no identifiers, come twice or are unknown, and for a gate that neither
            x nor R feeds.
    """
    states, gates = _names("states", states), _names("gates", gates)
    input = gates if input is None else _names("input", input)
    recurrent = gates if recurrent is None else _names("recurrent", recurrent)
    for argument, chosen in (("input", input), ("recurrent", recurrent)):
        if unknown := [name for name in chosen if name not in gates]:
            raise ValueError(f"{argument}: expected gates among {', '.join(gates)}; got {', '.join(unknown)}")
    if idle := [name for name in gates if name not in input + recurrent]:
        raise ValueError(f"gates: expected each in input or recurrent; got {', '.join(idle)} in neither")

    def decorate(function: Callable[[Any, Any], dict[str, Tensor]]) -> Cell:
        if not callable(function):
            raise TypeError(f"cell: expected a function of (s, g); got {type(function).__name__}")
        key = first = f"{function.__module__}.{function.__qualname__}"
        count = 1
        # a cell defined again, as in a notebook or a factory, must not change what the earlier one computes
        while key in _CELLS:
            count += 1
            key = f"{first}#{count}"
        _CELLS[key] = Cell(function.__name__, states, gates, input, recurrent, function, key)
        return _CELLS[key]

    return decorate


def lookup(key: str) -> Cell:
    """The cell of that key."""
    return _CELLS[key]


def _load(module: str, key: str) -> Cell:
    if key not in _CELLS:
        importlib.import_module(module)
    return lookup(key)


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument}: expected a sequence of names; got {names!r}")
    names = tuple(names)
    if not names:
        raise ValueError(f"{argument}: expected at least one name; got none")
    if wrong := [name for name in names if not name.isidentifier() or name.startswith("_")]:
        raise ValueError(
            f"{argument}: expected identifiers without leading underscore; got {', '.join(map(repr, wrong))}"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument}: expected each name once; got {', '.join(twice)} more than once")
    return names


@cache
def _forward_graph(cell: Cell, dtype: torch.dtype) -> fx.Graph:
    names = [f"s_{name}" for name in cell.states] + [f"g_{name}" for name in cell.gates]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return cell.step(values[: len(cell.states)], values[len(cell.states) :])

    return trace.pointwise_graph(f"cell {cell.name!r}", run, names, cell.states, dtype)


@cache
def _backward_graph(cell: Cell, dtype: torch.dtype) -> fx.Graph:
    inputs = [f"s_{name}" for name in cell.states] + [f"g_{name}" for name in cell.gates]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        # torch.func.vjp would import Dynamo
        leaves = [x.detach().requires_grad_() for x in values[: len(inputs)]]
        with torch.enable_grad(), own_graph():
            copies = [x.clone() for x in leaves]
            new = cell.step(copies[: len(cell.states)], copies[len(cell.states) :])
        pairs = [pair for pair in zip(new, values[len(inputs) :], strict=True) if pair[0].requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(x) for x in leaves)
        outputs, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True)

    _forward_graph(cell, dtype)  # its errors speak of the cell's own states
    names = inputs + [f"d_{name}" for name in cell.states]
    return trace.pointwise_graph(f"cell {cell.name!r}", run, names, inputs, dtype)
