"""Traces a pointwise function into a small graph of ATen operations, which backends run or print as device code."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from .torch_private import (
    DispatchMode,
    core_aten_decompositions,
    get_decompositions,
    is_mutable,
    name_of,
    overload_of,
    tree_leaves,
    tree_map,
)

_aten = torch.ops.aten
# copies and aliases mean nothing between values; an empty tensor only lends its shape
_SAME = {
    op.default
    for op in (_aten.detach, _aten.alias, _aten.clone, _aten.lift_fresh, _aten.lift_fresh_copy, _aten.empty_like)
}
# no pointwise tag, but nothing to do with neighbouring elements
_CREATE = {_aten.full_like.default, _aten.scalar_tensor.default, _aten._to_copy.default}
# one operation each in every backend, and several when decomposed
_KEEP = {_aten.sigmoid_backward.default, _aten.tanh_backward.default, _aten.empty_like.default}
# not in the core set; some releases of torch do not tag them as pointwise either
_ACTIVATIONS = [_aten.elu, _aten.hardtanh, _aten.leaky_relu, _aten.softplus, _aten.hardsigmoid, _aten.hardswish]
_IDLE_OPTIONS = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp_max(0) - torch.log1p(torch.exp(-x.abs())), x


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return grad * torch.sigmoid(-x)


def _rules() -> dict[Any, Callable[..., Any]]:
    known = dict(core_aten_decompositions().items()) | dict(get_decompositions(_ACTIVATIONS))
    rules = {op: rule for op, rule in known.items() if op not in _KEEP}
    # PyTorch's own go through integers
    rules[_aten.log_sigmoid_forward.default] = _log_sigmoid
    rules[_aten.log_sigmoid_backward.default] = _log_sigmoid_backward
    return rules


def pointwise_graph(
    owner: str,
    function: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    outputs: Sequence[str],
    dtype: torch.dtype,
) -> fx.Graph:
    """The graph of function, its placeholders named by names, without dead code and common subexpressions.

    Traced on scalars, so that no shape is baked in. Constants appear as scalar_tensor; they, and what is computed
    from them alone, are scalars that broadcast. Raises ValueError, naming the operation, for one that is not pointwise,
    and TypeError or ValueError for a result of another dtype or shape.
    """
    # A graph must not depend on the modes that its first caller happens to be under, such as torch.compile's fake
    # tensors or a dispatcher without autograd. All of them belong to a thread.
    with ThreadPoolExecutor(1) as clean:
        return clean.submit(_trace, owner, function, names, outputs, dtype).result()


def _trace(
    owner: str,
    function: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    outputs: Sequence[str],
    dtype: torch.dtype,
) -> fx.Graph:
    examples = [torch.full((), 0.5, dtype=dtype, device="cpu") for _ in names]
    for name, value in zip(outputs, function(*examples), strict=True):
        if value.dtype != dtype:
            raise TypeError(f"{owner}: expected {name} in {dtype} for inputs in {dtype}; got {value.dtype}")
        if value.shape:
            raise ValueError(f"{owner}: expected {name} of its inputs' shape; got an axis of its own")
    tracer = _Tracer(owner, names, examples)
    with tracer:
        results = function(*examples)
    tracer.graph.output(tuple(tracer.node(x) for x in results))
    tracer.graph.eliminate_dead_code()
    for node in tracer.graph.nodes:
        if node.op == "call_function":
            _check_pointwise(owner, node.target)
    tracer.graph.lint()
    return tracer.graph


class _Tracer(DispatchMode):
    """Writes down what is done to scalars, each expression once. make_fx would do, but imports Dynamo and Inductor,
    which takes longer than a first call's compilation."""

    def __init__(self, owner: str, names: Sequence[str], examples: Sequence[Tensor]) -> None:
        super().__init__()
        self.owner, self.rules, self.graph = owner, _rules(), fx.Graph()
        self.nodes = {id(x): self.graph.placeholder(name) for name, x in zip(names, examples, strict=True)}
        # so that an id stays one tensor's
        self.held = list(examples)
        self.seen: dict[Any, fx.Node] = {}

    def node(self, x: Tensor) -> fx.Node:
        """Of a tensor that is traced, or of a scalar from outside."""
        if id(x) in self.nodes:
            return self.nodes[id(x)]
        if x.requires_grad:
            raise ValueError(f"{self.owner}: expected no trainable tensor from outside; use a gate and its bias")
        if x.shape:
            raise ValueError(f"{self.owner}: expected only scalars from outside; got shape {list(x.shape)}")
        return self._emit(_aten.scalar_tensor.default, (x.item(),), {"dtype": x.dtype})

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in self.rules:
            with self:
                return self.rules[op](*args, **kwargs)
        if op == _aten._local_scalar_dense.default and id(args[0]) in self.nodes:
            raise ValueError(f"{self.owner}: expected no branch on a tensor's value; use torch.where")
        with self:
            out = op.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = op(*args, **kwargs)
        if isinstance(out, Tensor):
            self.held.append(out)
            self.nodes[id(out)] = self._found(op, args, kwargs)
        elif any(isinstance(x, Tensor) for x in tree_leaves(out)):
            raise ValueError(f"{self.owner}: expected operations with one result; {op} has several")
        return out

    def _found(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        target = _out_of_place(op)
        if target in _SAME:
            return self.node(args[0])
        if target == _aten.copy.default and args[0].dtype == args[1].dtype:
            return self.node(args[1])
        kwargs = {k: v for k, v in kwargs.items() if k not in _IDLE_OPTIONS}
        if target == _aten.full.default and not args[0]:
            target, args = _aten.scalar_tensor.default, args[1:]
        return self._emit(target, *tree_map(self._noted, (args, kwargs)))

    def _noted(self, x: Any) -> Any:
        return self.node(x) if isinstance(x, Tensor) else x

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        key = (target, _key(args), _key(tuple(sorted(kwargs.items()))))
        if key not in self.seen:
            self.seen[key] = self.graph.call_function(target, args, kwargs)
        return self.seen[key]


def _out_of_place(target: Any) -> Any:
    """mul for mul_: the trace already uses the result, not the changed argument, from there on."""
    name = name_of(target)
    if not name.endswith("_") or not is_mutable(target):
        return target
    return getattr(getattr(_aten, name[:-1]), overload_of(target), target)


def _check_pointwise(owner: str, target: Any) -> None:
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise ValueError(f"{owner}: expected a function of its inputs alone; {target} draws random numbers")
    if torch.Tag.pointwise not in tags and target not in _CREATE:
        raise ValueError(f"{owner}: expected pointwise operations; {target} is not one")


def _key(value: Any) -> Any:
    """Hashable, and unlike Python's equality it tells 0.0 from -0.0 and 1 from True."""
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
