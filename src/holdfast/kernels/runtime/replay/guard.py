"""Tells in little time whether a call is like another in all but values and addresses."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from holdfast.kernels.runtime.torch_private import current_device, tensor_check

# types whose equal values make no difference
CONSTANT = {int, float, bool, str, type(None), torch.dtype, torch.device}


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return what autocast casts to on devices of a kind, or None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _may_recur(tensors: Sequence[Tensor]) -> bool:
    """Return whether a guard can be made of a call with these tensors: none comes twice, each begins at 16 bytes."""
    return len({*map(id, tensors)}) == len(tensors) and not any(x.data_ptr() & 15 for x in tensors)


class CallGuard:
    """Finds calls that are like one: it may miss some, and takes none for it that is not.

    has_plain_kinds: whether calls of such kinds of arguments can be found. is_plain: whether any like this one can.
    """

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = (*arguments, *named.values())
        self.names, self.kinds = tuple(named), tuple(map(type, values))
        places = [n for n, x in enumerate(values) if isinstance(x, Tensor)]
        tensors = [values[n] for n in places]
        # a tensor in a tuple is not seen
        self.has_plain_kinds = bool(places) and {*self.kinds} <= CONSTANT | {Tensor, Parameter}
        self.is_plain = tensor_check is not None and self.has_plain_kinds and _may_recur(tensors)
        if self.is_plain:
            self.device, self.records = tensors[0].get_device(), torch.is_grad_enabled()
            self.kind = tensors[0].device.type
            self.cast = autocast_dtype(self.kind)
            self.tensors, self.others = _picks(places), _picks([n for n in range(len(values)) if n not in places])
            self.constants = self.others(values)
            self.check = tensor_check(tensors)

    def __call__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """Return the tensors of a call that is like it and runs on the current device; None for another."""
        values = (*arguments, *named.values())
        if not self.is_plain or tuple(map(type, values)) != self.kinds or tuple(named) != self.names:
            return None
        tensors = self.tensors(values)
        # of a nested one the check asks for strides, at which PyTorch ends the process
        if self.others(values) != self.constants or any(x.is_nested for x in tensors) or not self.check(*tensors):
            return None
        # which the check leaves out
        if torch.is_grad_enabled() != self.records or autocast_dtype(self.kind) != self.cast:
            return None
        bits = 0
        for x in tensors:
            bits |= x.data_ptr()
        is_current = self.device < 0 or current_device() == self.device
        return tensors if is_current and not bits & 15 else None


def _picks(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function from values to a tuple of those at places."""
    # of fewer than two itemgetter makes none
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[n] for n in places])
