"""An op as the bench sees it: random arguments, the exact result, how to call it, and which backends it has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import Backend
from holdfast.ops.families import backends_of, op_of, problem_of
from holdfast.ops.parity import leaves
from holdfast.planner import Problem
from holdfast.planner.choices import no_choice
from holdfast.recurrences import RECURRENCES, Recurrence, Sizes, oracle

from . import chunk_primitives
from .draw import DeviceDraw

# Left out of every call, so that all runners do the same work: most peers lack some of them.
LEFT_OUT = ("D", "z", "dt_bias")
GATES = ("a", "g", "theta")


@dataclass(frozen=True)
class Workload:
    """One op.

    example: (sizes, dtype, device, seed, with an initial state) -> tensor arguments. exact: (arguments, options) ->
    output, step by step in the arguments' dtype. call: (arguments, options, backend) -> output; with an initial state,
    both give (output, final state). output: arguments -> a tensor of the output's shape and dtype, uninitialised.
    state_steps: sizes -> elements of state times steps, which is what the oracle costs, but for the dense family, where
    gates count too. state_size: sizes -> elements of state of one step. has_state: whether example knows initial
    states. in_chunks: exact by the PyTorch backend, for sizes at which the steps take too long; None without one.
    """

    name: str
    family: str
    axes: tuple[str, ...]
    required: tuple[str, ...]
    example: Callable[[Mapping[str, int], torch.dtype, torch.device | str, int, bool], dict[str, Any]]
    exact: Callable[[dict[str, Any], dict[str, Any]], Any]
    call: Callable[[dict[str, Any], dict[str, Any], str], Any]
    backends: Callable[[], tuple[Backend, ...]]
    problem: Callable[[dict[str, Any], dict[str, Any], bool], Problem]
    output: Callable[[dict[str, Any]], Tensor]
    state_steps: Callable[[Mapping[str, int]], int]
    state_size: Callable[[Mapping[str, int]], int]
    has_state: bool = False
    in_chunks: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError for an axis that the op lacks, one that is missing, or a size below 1."""
        for axis, size in sizes.items():
            if axis not in self.axes:
                raise ValueError(f"sizes: {self.name} has axes {', '.join(self.axes)}; got {axis!r}")
            if size < 1:
                raise ValueError(f"sizes: expected {axis} >= 1; got {size}")
        if missing := [axis for axis in self.required if axis not in sizes]:
            raise ValueError(f"sizes: {self.name} needs {', '.join(self.required)}; missing {', '.join(missing)}")


# gate_bits: those of a diagonal recurrence's gates and angles, 32 by default, or 16, in x's dtype
_OPTIONAL = {"matrix": ("Hq",), "diagonal": ("gate_bits",), "dense": (), "selective": ()}
_REQUIRED = {
    "matrix": ("B", "T", "H", "K", "V"),
    "diagonal": ("B", "T", "D"),
    "dense": ("B", "T", "H", "D"),
    "selective": ("B", "T", "D", "N"),
}


def _state_steps(family: str) -> Callable[[Mapping[str, int]], int]:
    def count(sizes: Mapping[str, int]) -> int:
        total = 1
        for axis in _REQUIRED[family]:
            total *= sizes[axis]
        # gates and states of a cell
        return total * 8 if family == "dense" else total

    return count


def _given(sizes: Mapping[str, int]) -> Sizes:
    known = {field.name for field in fields(Sizes)}
    return Sizes(**{name: size for name, size in sizes.items() if name in known})


def _shapes(recurrence: Recurrence, sizes: Mapping[str, int]) -> dict[str, Any]:
    return recurrence.example(DeviceDraw(0, torch.float32, "meta"), _given(sizes))


def _state_size(recurrence: Recurrence) -> Callable[[Mapping[str, int]], int]:
    return lambda sizes: sum(x.numel() for x in leaves(_shapes(recurrence, sizes)["initial_state"]))


def _output(arguments: dict[str, Any]) -> Tensor:
    """Of v's, or x's shape; the gates of a dense recurrence's x are not in it."""
    like = arguments["v"] if "v" in arguments else arguments["x"]
    return torch.empty_like(like[:, :, 0] if "R" in arguments else like)


def _of_recurrence(recurrence: Recurrence) -> Workload:
    def example(
        sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str, seed: int, state: bool
    ) -> dict[str, Any]:
        left_out = LEFT_OUT if state else (*LEFT_OUT, "initial_state")
        drawn = recurrence.example(DeviceDraw(seed, dtype, device), _given(sizes))
        if (bits := sizes.get("gate_bits", 32)) not in (16, 32):
            raise ValueError(f"sizes: expected gate_bits to be 16, x's dtype, or 32; got {bits}")
        if bits == 16:
            drawn |= {name: x.to(dtype) for name, x in drawn.items() if name in GATES}
        return {name: x for name, x in drawn.items() if name not in left_out}

    def exact(arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        output, final_state = oracle(recurrence, arguments | options)
        return (output, final_state) if "initial_state" in arguments else output

    def call(arguments: dict[str, Any], options: dict[str, Any], backend: str) -> Any:
        state = "initial_state" in arguments
        output, final_state = op_of(recurrence)(**arguments, **options, output_final_state=state, backend=backend)
        return (output, final_state) if state else output

    def in_chunks(arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        return call(arguments, options, "chunked")

    required = _REQUIRED[recurrence.family]
    return Workload(
        name=recurrence.name,
        family=recurrence.family,
        axes=(*required, *_OPTIONAL[recurrence.family]),
        required=required,
        example=example,
        exact=exact,
        call=call,
        backends=lambda: backends_of(recurrence),
        problem=lambda arguments, options, grad: problem_of(recurrence, arguments | options, None, grad),
        output=_output,
        state_steps=_state_steps(recurrence.family),
        state_size=_state_size(recurrence),
        has_state=True,
        in_chunks=None if recurrence.family == "dense" else in_chunks,
    )


def _chunk_primitives() -> dict[str, Workload]:
    return {
        "inter_chunk_scan": Workload(
            name="inter_chunk_scan",
            family="diagonal",
            axes=("B", "G", "H", "K", "V", "Kg", "r"),
            required=("B", "G", "H", "K", "V"),
            example=chunk_primitives.inter_chunk_example,
            exact=chunk_primitives.inter_chunk_exact,
            call=chunk_primitives.inter_chunk_call,
            backends=chunk_primitives.inter_chunk_backends,
            problem=chunk_primitives.inter_chunk_problem,
            output=lambda arguments: torch.empty_like(arguments["states"]),
            state_steps=lambda s: s["B"] * s["G"] * s["H"] * s["K"] * s["V"],
            state_size=lambda s: s["B"] * s["H"] * s["K"] * s["V"],
        ),
        "intra_chunk": Workload(
            name="intra_chunk",
            family="matrix",
            axes=("B", "T", "H", "K", "V", "C"),
            required=("B", "T", "H", "K", "V", "C"),
            example=chunk_primitives.intra_chunk_example,
            exact=chunk_primitives.intra_chunk_exact,
            call=chunk_primitives.intra_chunk_call,
            backends=chunk_primitives.intra_chunk_backends,
            problem=chunk_primitives.intra_chunk_problem,
            output=lambda arguments: torch.empty_like(arguments["v"]),
            state_steps=lambda s: s["B"] * s["T"] * s["H"] * max(s["C"], s["K"]),
            state_size=lambda s: s["B"] * s["H"] * s["K"] * s["V"],
        ),
    }


@cache
def workloads() -> dict[str, Workload]:
    """Every op that can be measured, by name."""
    return {name: _of_recurrence(recurrence) for name, recurrence in RECURRENCES.items()} | _chunk_primitives()


def workload(name: str) -> Workload:
    """The op of that name; ValueError with the known ones otherwise."""
    try:
        return workloads()[name]
    except KeyError:
        raise ValueError(no_choice("op", workloads(), name)) from None
