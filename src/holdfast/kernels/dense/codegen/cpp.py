"""A cell as C++: its constants and the two functions of a step, for CUDA and for a host compiler alike."""

from functools import cache

import torch

from holdfast.recurrences.cell import Cell

from . import expression
from .expression import Unprintable
from .language import CPP


@cache
def unprintable(cell: Cell) -> str | None:
    """Why the cell cannot be printed, or None."""
    try:
        functions(cell)
    except Unprintable as error:
        return f"cell {cell.name!r} has {error}"
    return None


@cache
def functions(cell: Cell) -> str:
    """cell_forward(s, g, out) and cell_backward(s, g, d, ds, dg), arrays in the cell's order of states and gates.

    Raises Unprintable for an operation that has no form.
    """
    states, gates = len(cell.states), len(cell.gates)
    inputs = {f"s_{name}": f"s[{k}]" for k, name in enumerate(cell.states)}
    inputs |= {f"g_{name}": f"g[{k}]" for k, name in enumerate(cell.gates)}
    step = cell.forward_graph(torch.float32)
    forward, new = expression.statements(step, inputs, CPP, f"s_{cell.states[0]}" not in expression.reads(step))
    inputs |= {f"d_{name}": f"d[{k}]" for k, name in enumerate(cell.states)}
    backward, grads = expression.statements(cell.backward_graph(torch.float32), inputs, CPP)
    forward += [f"out[{k}] = {text};" for k, text in enumerate(new)]
    backward += [f"ds[{k}] = {text};" for k, text in enumerate(grads[:states])]
    backward += [f"dg[{k}] = {text};" for k, text in enumerate(grads[states:])]
    old, pre = f"const float (&s)[{states}]", f"const float (&g)[{gates}]"
    return "\n".join(
        [
            f"HF_DEVICE void cell_forward({old}, {pre}, float (&out)[{states}]) {{",
            *(f"    {line}" for line in forward),
            "}",
            "",
            f"HF_DEVICE void cell_backward({old}, {pre}, const float (&d)[{states}], float (&ds)[{states}],",
            f"                             float (&dg)[{gates}]) {{",
            *(f"    {line}" for line in backward),
            "}",
            "",
        ]
    )


@cache
def old_states(cell: Cell) -> tuple[bool, ...]:
    """For each state, whether the backward function needs its value before the step."""
    needed = expression.reads(cell.backward_graph(torch.float32))
    return tuple(f"s_{name}" in needed for name in cell.states)


@cache
def compares(cell: Cell) -> bool:
    """Whether the backward function branches, as at a maximum, or jumps: a rounded gate may fall on the other side."""
    sharp = ("eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "fmod", "remainder")
    names = {str(node.target).rsplit(".", 1)[0] for node in cell.backward_graph(torch.float32).nodes}
    return bool(names & {f"aten.{name}" for name in sharp})


@cache
def constants(cell: Cell) -> str:
    """STATES, GATES, and where x's and R's gates are: INPUT_OF and RECURRENT_OF hold -1 for a gate without."""
    fed = [cell.input.index(gate) if gate in cell.input else -1 for gate in cell.gates]
    mixed = [cell.recurrent.index(gate) if gate in cell.recurrent else -1 for gate in cell.gates]
    # gates whose gradient is not in dx but which dR needs
    only = [gate for gate in cell.recurrent if gate not in cell.input]
    extra = [only.index(gate) if gate in only else -1 for gate in cell.gates]
    needs = [int(needed) for needed in old_states(cell)]

    def array(name: str, values: list[int]) -> str:
        return f"HF_CONSTANT int {name}[] = {{{', '.join(map(str, values))}}};"

    return "\n".join(
        [
            f"constexpr int STATES = {len(cell.states)}, GATES = {len(cell.gates)};",
            f"constexpr int INPUTS = {len(cell.input)}, RECURRENTS = {len(cell.recurrent)}, EXTRAS = {len(only)};",
            array("INPUT_OF", fed),
            array("RECURRENT_OF", mixed),
            array("EXTRA_OF", extra),
            array("GATE_OF", [cell.gates.index(gate) for gate in cell.recurrent]),
            array("NEEDS", needs),
            "",
        ]
    )
