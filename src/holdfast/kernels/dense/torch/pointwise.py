"""Runs a cell's graphs on tensors: as Python code, generated once, that writes results where they belong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from holdfast.recurrences.cell import Cell
from holdfast.recurrences.torch_private import name_of, schema_of

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Backward:
    """The vjp of a cell in two parts.

    prepare: (states, gates) of any number of steps -> what carry needs of them. carry: (gradients of the new states,
    the step's parts of what prepare returns, tensors to write the gates' gradients to) -> gradients of the old states.
    """

    prepare: Run
    carry: Run


@cache
def forward(cell: Cell, dtype: torch.dtype, device: torch.device) -> Run:
    """(states, gates, tensors to write the new states to) -> None."""
    graph = cell.forward_graph(dtype)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return _generate(graph, device, inputs, _outputs(graph), into=range(len(cell.states)))


@cache
def backward(cell: Cell, dtype: torch.dtype, device: torch.device) -> Backward:
    """All that does not wait for a gradient is hoisted out of the loop over time, where a block of steps shares it."""
    graph = cell.backward_graph(dtype)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    known, grads = inputs[: -len(cell.states)], inputs[-len(cell.states) :]
    waits, full = set(grads), _full(graph)
    for node in graph.nodes:
        if any(x in waits for x in node.all_input_nodes):
            waits.add(node)
    results = _outputs(graph)
    late = [node for node in graph.nodes if node.op == "call_function" and node in waits]
    used = [x for node in late for x in node.all_input_nodes] + results
    shared = [node for node in dict.fromkeys(used) if node in full and node not in waits]
    prepare = _generate(graph, device, known, shared)
    carry = _generate(graph, device, grads + shared, results, into=range(len(cell.states), len(results)))
    return Backward(prepare, carry)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return list(next(node for node in graph.nodes if node.op == "output").args[0])


def _full(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of the inputs' shape; the others are scalars."""
    full: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(x in full for x in node.all_input_nodes):
            full.add(node)
    return full


def _constants(graph: fx.Graph, device: torch.device) -> dict[fx.Node, Tensor]:
    """The values of the graph's scalars, made once: a step neither makes them nor copies them to the device."""
    full, values = _full(graph), {}
    # usable from every mode, whichever the first call is in
    with torch.inference_mode(False):
        for node in graph.nodes:
            if node.op == "call_function" and node not in full:
                arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*arguments[0], **arguments[1])
    return {node: value.to(device) for node, value in values.items()}


def _generate(
    graph: fx.Graph,
    device: torch.device,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    into: Sequence[int] = (),
) -> Run:
    """A function of inputs, then of a tensor for each output in into; it returns the other outputs."""
    wanted, stack = set(inputs), list(outputs)
    nodes: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            nodes.add(node)
            stack.extend(node.all_input_nodes)
    constants = _constants(graph, device)
    scope: dict[str, Any] = {node.name: value for node, value in constants.items()}
    targets = {n: f"out{n}" for n in into}
    lines, written, full = [], set(), _full(graph)
    for node in graph.nodes:
        if node not in nodes or node in constants:
            continue
        arguments = [_text(x) for x in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
        home = next((n for n in into if outputs[n] is node), None)
        write = None
        if home is not None and torch.Tag.pointwise in node.target.tags:
            write = _writing(node.target)
        if write:
            scope[f"f_{node.name}"], keyword = write
            arguments.append(f"{keyword}={targets[home]}")
            written.add(home)
        else:
            scope[f"f_{node.name}"] = _quick(node.target)
        lines.append(f"{node.name} = f_{node.name}({', '.join(arguments)})")
    lines += [f"{targets[n]}.copy_({outputs[n].name})" for n in into if n not in written]
    rest = [n for n in range(len(outputs)) if n not in targets]
    shape = inputs[0].name
    returned = [outputs[n].name if outputs[n] in full else f"{outputs[n].name}.expand_as({shape})" for n in rest]
    lines.append(f"return ({', '.join(returned)}{',' if returned else ''})")
    names = ", ".join([node.name for node in inputs] + list(targets.values()))
    scope["torch"], scope["inf"], scope["nan"] = torch, float("inf"), float("nan")
    exec(f"def run({names}):\n    " + "\n    ".join(lines), scope)
    return scope["run"]


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return value.name if isinstance(value, fx.Node) else repr(value)


def _quick(target: Any) -> Any:
    """torch's own binding of an ATen operation where there is one: it costs half as much to call."""
    return getattr(torch, name_of(target), target)


def _writing(target: Any) -> tuple[Any, str] | None:
    """The form of an ATen operation that writes to a tensor, and the keyword that takes it."""
    packet = target.overloadpacket
    schema = schema_of(target)
    if schema is None:
        return None
    inputs = [x.name for x in schema.arguments]
    for name in packet.overloads():
        arguments = schema_of(getattr(packet, name)).arguments
        out = [x.name for x in arguments if x.is_out]
        if len(out) == 1 and [x.name for x in arguments if not x.is_out] == inputs:
            # a binding says in its signature whether it writes; torch.relu does not
            binding = getattr(torch, packet.__name__, None)
            quick = out == ["out"] and "out=None" in (getattr(binding, "__doc__", None) or "")
            return (binding if quick else getattr(packet, name)), out[0]
    return None
