"""A cell as Triton: its two functions, which kernels take as constants."""

import linecache
import re
from functools import cache
from typing import Any, NamedTuple

import torch

from holdfast.recurrences.cell import Cell

from . import expression
from .expression import Unprintable
from .language import TRITON


class Functions(NamedTuple):
    """forward(s, g) -> states; backward(s, g, d) -> gradients of the states, then of the gates. All are tuples.

    What does not depend on any of them may be a number.
    """

    forward: Any
    backward: Any


@cache
def unprintable(cell: Cell) -> str | None:
    """Why the cell cannot be printed, or None."""
    try:
        text(cell)
    except Unprintable as error:
        return f"cell {cell.name!r} has {error}"
    return None


@cache
def text(cell: Cell) -> str:
    """The source of the two functions. Raises Unprintable for an operation that has no form in Triton."""
    inputs = {f"s_{name}": f"s[{k}]" for k, name in enumerate(cell.states)}
    inputs |= {f"g_{name}": f"g[{k}]" for k, name in enumerate(cell.gates)}
    forward = expression.statements(cell.forward_graph(torch.float32), inputs, TRITON)
    inputs |= {f"d_{name}": f"d[{k}]" for k, name in enumerate(cell.states)}
    backward = expression.statements(cell.backward_graph(torch.float32), inputs, TRITON)
    printed = "\n".join([*_function("forward", "s, g", *forward), "", "", *_function("backward", "s, g, d", *backward)])
    known = _known()
    for name in re.findall(r"\b(\w+)\(", "\n".join(forward[0] + backward[0])):
        if name not in known and name != "where":
            raise Unprintable(f"{name}, which has no form in Triton")
    return printed + "\n"


def _function(name: str, parameters: str, lines: list[str], results: list[str]) -> list[str]:
    returned = f"    return ({', '.join(results)},)"
    return ["@triton.jit", f"def {name}({parameters}):", *(f"    {line}" for line in lines), returned]


@cache
def _known() -> dict[str, Any]:
    # triton comes only with torch's CUDA builds
    from . import triton_functions

    return {name: value for name, value in vars(triton_functions).items() if not name.startswith("_")}


@cache
def functions(cell: Cell) -> Functions:
    """The two functions, made from text(cell)."""
    source = text(cell)
    # Triton reads a function's source where Python's own tracebacks look for it
    name = f"<triton cell {cell.key}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    made: dict[str, Any] = {**_known(), "__name__": __name__}
    exec(compile(source, name, "exec"), made)
    return Functions(made["forward"], made["backward"])
