"""Several backends under one name: kernels of one compiler that serve different matrix recurrences."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.kernels.backend import Backend
from holdfast.planner import Candidate, Device, Direction, Problem

from .refusal import AnothersKernel


class SavedShape(NamedTuple):
    """Sizes and dtype of the tensor that a forward pass saves for its backward pass."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class GradRoom(NamedTuple):
    """Where a layer has room for gradients of q and k [B, T, Hq, K] and v [B, T, H, V], any strides; None: nowhere.

    A backend with takes_room returns the very tensors that it wrote to. It may write elsewhere: callers copy then.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Variant(Backend, Protocol):
    """A backend among others of its name; its reject alone says which calls it runs.

    One with uses_forward_output has a forward pass that may return a third tensor, and a backward pass that takes the
    first and the third after its other arguments. One with takes_room has a backward pass that takes room, a GradRoom.
    """


class SavingVariant(Variant, Protocol):
    """One with uses_forward_output.

    saved_shape says what the third tensor is, or None if this problem has none. It is asked before a plan is made: for
    problems that are then rejected too, and with B, T and H that may be symbols.
    """

    uses_forward_output: bool

    def saved_shape(self, problem: Problem) -> SavedShape | None: ...


class BackendVariants:
    """Variants of one name, of which at most one serves a problem; that one runs the call."""

    def __init__(self, *variants: Variant) -> None:
        (self.name,) = {variant.name for variant in variants}
        self.variants = variants

    def reject(self, problem: Problem, device: Device) -> str | None:
        reasons = [variant.reject(problem, device) for variant in self.variants]
        if None in reasons:
            return None
        own = [reason for reason in reasons if not isinstance(reason, AnothersKernel)]
        return "; ".join(dict.fromkeys(map(str, own or reasons)))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return self.variant(problem, device).candidates(problem, device, direction)

    def variant(self, problem: Problem, device: Device) -> Variant:
        """The one that serves a problem, which must not be rejected."""
        (serving,) = (variant for variant in self.variants if variant.reject(problem, device) is None)
        return serving

    def saving(self, problem: Problem) -> Iterator[tuple[Variant, SavedShape]]:
        """The variants that would save something of such a problem, if they serve it, and what."""
        for variant in self.variants:
            if uses_forward_output(variant) and (shape := variant.saved_shape(problem)) is not None:
                yield variant, shape


def uses_forward_output(backend: Backend) -> bool:
    return getattr(backend, "uses_forward_output", False)


def takes_room(backend: Backend) -> bool:
    return getattr(backend, "takes_room", False)
