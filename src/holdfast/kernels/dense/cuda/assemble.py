"""Puts a kernel's source together: the cell as C++, the numbers of a plan, and the .cu files of this family."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from holdfast.kernels.dense.codegen import cpp
from holdfast.recurrences.cell import Cell


@cache
def _read(name: str) -> str:
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")


def saved_gate_slots(gates: int) -> int:
    """Return the places of one channel's gates in memory: a power of two, so that a lane takes them in one access."""
    return 1 << (gates - 1).bit_length()


@cache
def _assemble(cell: Cell, dtype: str, numbers: tuple[tuple[str, int], ...], parts: tuple[str, ...]) -> str:
    named = {"GATES_SAVED": saved_gate_slots(len(cell.gates)), "WIDE_GATES": int(cpp.compares(cell)), **dict(numbers)}
    return "\n".join(
        [
            f"constexpr bool BFLOAT16 = {'true' if dtype == 'bfloat16' else 'false'};",
            _read("functions.cuh"),
            cpp.constants(cell),
            cpp.functions(cell),
            *(f"constexpr int {name} = {value};" for name, value in named.items()),
            *(_read(part) for part in parts),
        ]
    )


def part(name: str) -> str:
    """Return a file as it is."""
    return _read(name)


def within(space: str, numbers: Mapping[str, int], *parts: str) -> str:
    """Return files that are compiled once more for other numbers, in a namespace."""
    text = "\n".join(_read(part) for part in parts)
    constants = "\n".join(f"constexpr int {name} = {value};" for name, value in numbers.items())
    return f"namespace {space} {{\n{constants}\n{text}\n}}\n"


def assemble(cell: Cell, dtype: str, numbers: Mapping[str, int], *parts: str) -> str:
    """Return the whole source. dtype: "bfloat16" or "float16". numbers: constants that the parts expect before them."""
    return _assemble(cell, dtype, tuple(numbers.items()), parts)
