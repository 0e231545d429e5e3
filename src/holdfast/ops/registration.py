"""Operators registered with PyTorch's dispatcher directly: torch.library.custom_op's contract in less host time.

On a CPU with torch 2.13, custom_op keeps the host for 17 us a call, 73 where a gradient is recorded; this for 6 and 20.
`torch.library.opcheck` tests that what is registered holds. Where PyTorch has not the names that this takes, custom_op
registers them.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.compile_pool import with_parallel_compile
from holdfast.kernels.runtime.dynamo import disable_dynamo
from holdfast.kernels.runtime.replay.autograd_path import note_differentiable
from holdfast.kernels.runtime.replay.recording import RECORDING, note_written, register_implementation
from holdfast.kernels.runtime.torch_private import below_autograd, below_views
from holdfast.recurrences.torch_private import OpOverload, name_of

from .check import needs_grad
from .derivatives import gradients_once, refuse_forward_mode, refuse_transforms

# of a copy of the package under another name, that name: it may stand beside this one
NAMESPACE = __name__.partition(".")[0]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# bytes; compiled graphs assert it of the results of custom ops
ALIGNMENT = 16
# ops that custom_op registered
_BY_PYTORCH: dict[OpOverload, Any] = {}


def _aligned(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, with copies of results that begin elsewhere: one of several that a kernel wrote to one buffer."""

    @wraps(run)
    def call(*arguments: Any) -> Any:
        results = run(*arguments)
        if isinstance(results, Tensor):
            return _begun_anew(results)
        return tuple(map(_begun_anew, results)) if isinstance(results, tuple) else results

    return call


def _begun_anew(x: Tensor) -> Tensor:
    return x.clone() if x.storage_offset() * x.element_size() % ALIGNMENT else x


def define(name: str, run: Callable[..., Any], fake: Callable[..., Any], mutates: Iterable[str] = ()) -> OpOverload:
    """torch.ops.holdfast.<name>, for every device. run: annotated, from which the schema follows; runs below autograd.

    fake: run on tensors without data; its results' strides are those of run's, by which compiled graphs read them, for
    arguments in any memory. mutates: the arguments that run writes to. No output may be or alias an input.
    """
    changed = tuple(mutates)
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    schema = torch.library.infer_schema(run, mutates_args=changed)
    if below_autograd is None:
        made = torch.library.custom_op(
            f"{NAMESPACE}::{name}", disable_dynamo(_aligned(run)), mutates_args=changed, schema=schema, tags=tags
        )
        made.register_fake(fake)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        _BY_PYTORCH[op] = made
        register_implementation(op, run)
        return op
    _LIBRARY.define(name + schema, tags=tags)
    # compiled code calls back into Python here
    _LIBRARY.impl(name, disable_dynamo(_aligned(run)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    register_implementation(op, run)
    if changed:
        places = [n for n, argument in enumerate(signature(run).parameters) if argument in changed]

        def count_changes(*arguments: Any) -> Any:
            # autograd finds by a tensor's version that what it saved has been written to
            written = [x for n in places if (x := arguments[n]) is not None]
            torch.autograd.graph.increment_version(written)
            if RECORDING:
                note_written(written)
            with below_views():
                return op(*arguments)

        _LIBRARY.impl(name, count_changes, "ADInplaceOrView")
    return op


class _DryRunContext:
    """An autograd context of a dry run, which has no other way to a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None: ...


def differentiable(
    op: OpOverload,
    save: Callable[[Any, tuple[Any, ...]], None],
    backward: Callable[..., tuple[Any, ...]],
    inputs: int,
    save_outputs: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    run: Callable[..., Any] | None = None,
    used: int = 1,
) -> Callable[..., Any]:
    """Gives op a gradient, which is not differentiable itself. Returns a function that is op, called in less time.

    save(ctx, inputs) and backward(ctx, *gradients of the outputs) are of a torch.autograd.Function; gradients may be
    None. inputs: how many of the arguments, the first, are tensors that may need a gradient; backward returns as many.
    save_outputs(ctx, inputs, outputs): for an op whose backward pass reads what its forward pass returned. run: op, or
    what calls it. used: how many of the outputs, the first, usually have a gradient: kernels for those are compiled
    beside op's.
    """
    run = op if run is None else run
    name = name_of(op)
    if op in _BY_PYTORCH:
        return _differentiable_by_pytorch(op, save, backward, inputs, save_outputs)

    def run_dry(arguments: tuple[Any, ...], outputs: Any) -> None:
        kept, made = _DryRunContext(), outputs if isinstance(outputs, tuple) else (outputs,)
        save(kept, arguments)
        if save_outputs is not None:
            save_outputs(kept, arguments, outputs)
        backward(kept, *(torch.empty_like(x) if n < used else None for n, x in enumerate(made)))

    class Recorded(torch.autograd.Function):
        # PyTorch looks at each argument in Python, so those that need no gradient come as one
        @staticmethod
        def forward(ctx: Any, others: tuple[Any, ...], *tensors: Any) -> Any:
            arguments = (*tensors, *others)
            ctx.set_materialize_grads(False)
            save(ctx, arguments)
            with below_autograd():
                outputs = with_parallel_compile(run, arguments, {}, run_dry)
            if save_outputs is not None:
                save_outputs(ctx, arguments, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, *gradients_once(name, backward, ctx, grads)

    # apply, but for its look at each argument, in Python, for what a transform of torch.func may have left
    apply = super(torch.autograd.Function, Recorded).apply

    def of_plain(*arguments: Any) -> Any:
        return apply(arguments[inputs:], *arguments[:inputs])

    def record(*arguments: Any) -> Any:
        refuse_forward_mode(name, arguments[:inputs])
        if needs_grad(*arguments[:inputs]):
            refuse_transforms(name)
            outputs = Recorded.apply(arguments[inputs:], *arguments[:inputs])
            note_differentiable(of_plain, arguments, outputs)
            return outputs
        with below_autograd():
            return run(*arguments)

    _LIBRARY.impl(name, record, "Autograd")

    def call(*arguments: Any) -> Any:
        # a graph is to hold op itself; otherwise the dispatcher would only come back to record
        return op(*arguments) if torch.compiler.is_compiling() else record(*arguments)

    return call


def _differentiable_by_pytorch(
    op: OpOverload, save: Any, backward: Any, count: int, save_outputs: Any
) -> Callable[..., Any]:
    """`differentiable` for an op that custom_op registered. count: of its inputs."""
    name = name_of(op)

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.others = len(inputs) - count
        save(ctx, inputs)
        if save_outputs is not None:
            save_outputs(ctx, inputs, output)

    def grads_of(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (*gradients_once(name, backward, ctx, grads), *[None] * ctx.others)

    _BY_PYTORCH[op].register_autograd(grads_of, setup_context=set_up)

    def call(*arguments: Any) -> Any:
        refuse_forward_mode(name, arguments[:count])
        if needs_grad(*arguments[:count]):
            refuse_transforms(name)
        return op(*arguments)

    return call
