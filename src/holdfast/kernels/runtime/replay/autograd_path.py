"""Calls under autograd whose ops take their own arguments, made without the Python around those ops.

A public op's checks and its mapping onto the family's call come to the same end for calls that are alike. Where nothing
but ops of Holdfast's makes a new tensor on the way, another call hands its own tensors to them at once.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from holdfast.kernels.runtime.torch_private import is_wrapped

from .guard import CallGuard
from .recording import Slot, filled

# of a thread that looks for a fast path: the ops with a gradient that ran, their arguments and outputs
_RAN: dict[int, list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Tensor, ...]]]] = {}


def note_differentiable(op: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any) -> None:
    """Tell a thread that looks for a fast path that an op that records a gradient returned outputs for arguments.

    op: does the same for tensors that no transform of torch.func has wrapped.
    """
    if _RAN and (ran := _RAN.get(threading.get_ident())) is not None:
        ran.append((op, arguments, _made(outputs)))


class AutogradFastPath:
    """Calls ops on the tensors of calls that are alike, and on what they return."""

    def __init__(self, guard: CallGuard, ops: list[tuple[Callable[..., Any], list[Any]]], outputs: Any) -> None:
        """ops: each with its arguments, slots in the place of tensors. outputs: of the call, likewise. Slots count the
        call's tensors, then what op by op returns."""
        self.guard, self.outputs = guard, outputs
        self.ops = [(op, [None if isinstance(x, Slot) else x for x in given], _slots(given)) for op, given in ops]

    def __call__(self, tensors: tuple[Tensor, ...]) -> Any:
        slots = [*tensors]
        for op, constants, places in self.ops:
            arguments = constants.copy()
            for at, number in places:
                arguments[at] = slots[number]
            slots += _made(op(*arguments))
        return filled(self.outputs, slots)


def _made(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if outputs.__class__ is tuple else (outputs,)


def _slots(values: list[Any]) -> list[tuple[int, int]]:
    return [(at, x.number) for at, x in enumerate(values) if isinstance(x, Slot)]


def find_fast_path(
    run: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, AutogradFastPath | str | None]:
    """Return what run does, and a fast path of calls like it, or why there is none; None where another may have one."""
    thread = threading.get_ident()
    if thread in _RAN:
        return run(*arguments, **named), None
    _RAN[thread] = ran = []
    try:
        outputs = run(*arguments, **named)
    finally:
        del _RAN[thread]
    guard = CallGuard(arguments, named)
    if not guard.is_plain:
        # others of its kinds may have tensors at other addresses
        return outputs, None if guard.has_plain_kinds else "its arguments are not all tensors, numbers and names"
    if not ran:
        return outputs, "no op of Holdfast's records its gradient"
    tensors = [*guard.tensors((*arguments, *named.values()))]
    if any(is_wrapped(x) for x in tensors):
        return outputs, None
    ops: list[tuple[Callable[..., Any], list[Any]]] = []
    try:
        for op, given, made in ran:
            if any(isinstance(x, tuple | list) for x in given):
                raise LookupError
            ops.append((op, [_slotted(x, tensors) for x in given]))
            tensors += made
        returned = _slotted(outputs, tensors)
    except LookupError:
        return outputs, "it makes tensors around the ops that record its gradient"
    return outputs, AutogradFastPath(guard, ops, returned)


def _slotted(x: Any, tensors: list[Tensor]) -> Any:
    """x with slots in the place of tensors. Raises LookupError for one that is not there."""
    if isinstance(x, Tensor):
        for n, y in enumerate(tensors):
            if x is y:
                return Slot(n)
        raise LookupError
    return type(x)([_slotted(part, tensors) for part in x]) if isinstance(x, tuple | list) else x
