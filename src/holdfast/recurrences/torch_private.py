"""Private names of PyTorch that every floor above may need: those of tracing, nested structures and operators.

`kernels/runtime/torch_private.py` has the others, and warns of the ones that are not there.
"""

import contextlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch

# without these no cell is traced, and there is nothing that could serve instead
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._decomp import get_decompositions as get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
OpOverload = type(torch.ops.aten.mul.Tensor)
# what is not there, or does something else than expected, and what that costs
MISSING: list[str] = []
NO_REPLAY = "no call is replayed"


def find(name: str, costs: str, take: Callable[[], T], instead: T) -> T:
    """What take returns, which tries what it takes; instead, and a note in MISSING, where that raises."""
    with contextlib.suppress(Exception):
        return take()
    MISSING.append(f"{name} ({costs})")
    return instead


def expect(holds: bool) -> None:
    """Raises LookupError where a name does not do what it is taken for."""
    if not holds:
        raise LookupError


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of Holdfast's own, which PyTorch need not import Dynamo to skip: nothing compiled enters one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _schemas() -> Callable[[Any], Any]:
    aten = torch.ops.aten
    read, write = aten.mul.Tensor._schema, aten.mul_.Tensor._schema
    expect(write.is_mutable and not read.is_mutable)
    expect([x.name for x in read.arguments] == ["self", "other"] and not any(x.is_out for x in read.arguments))
    expect(write.arguments[0].alias_info.is_write and read.arguments[0].alias_info is None)
    expect(aten.view.default._schema.returns[0].alias_info is not None)
    return attrgetter("_schema")


# of an operator its arguments and returns, and which of them are written to or views; None for what is not known
schema_of: Callable[[Any], Any] = find("OpOverload._schema", NO_REPLAY, _schemas, lambda op: None)


def _top_hooks() -> Callable[[], Any]:
    top, pair = torch._C._autograd._top_saved_tensors_default_hooks, (torch.clone, torch.detach)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        expect(top(True) == pair)
    return lambda: top(True)


# the hooks on saved tensors that this thread is under, None without any
_hooks_on_saved: Callable[[], Any] = find(
    "torch._C._autograd._top_saved_tensors_default_hooks", "PyTorch's paths take longer", _top_hooks, lambda: True
)


def own_graph() -> contextlib.AbstractContextManager[Any]:
    """Within it the caller's hooks on saved tensors see nothing: for a graph that is differentiated where it is made.

    Activation checkpointing counts what its hooks see, and fails where a second run saves less than the first.
    """
    if _hooks_on_saved() is None:
        return contextlib.nullcontext()
    # a copy, since an output that is its own saved tensor would keep itself alive
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)


def is_mutable(op: Any) -> bool:
    """Whether an operator writes to an argument."""
    schema = schema_of(op)
    # so PyTorch names those that do
    return name_of(op).endswith("_") if schema is None else schema.is_mutable


def name_of(op: Any) -> str:
    """An operator's name without its namespace and overload: "mul" of aten::mul.Tensor."""
    return op.name().partition("::")[2].partition(".")[0]


def overload_of(op: Any) -> str:
    """The name of an operator's overload, as its packet has it: "Tensor", "default"."""
    return op.name().partition(".")[2] or "default"


def _leaves(tree: Any, *_: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple | list) else [tree]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((name, _mapped(change, part)) for name, part in tree.items())
    if isinstance(tree, tuple | list):
        parts = [_mapped(change, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree)


def _pytree() -> tuple[Callable[..., list[Any]], Callable[..., Any]]:
    from torch.utils import _pytree

    tree = {"a": [1, (2, None)], "b": 3}
    expect(_pytree.tree_leaves(tree) == [1, 2, None, 3])
    expect(_pytree.tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": "3"})
    return _pytree.tree_leaves, _pytree.tree_map


# of tuples, lists and dicts, and by PyTorch's own also of what is registered with it
tree_leaves, tree_map = find(
    "torch.utils._pytree", "only tuples, lists and dicts are taken apart", _pytree, (_leaves, _mapped)
)
