"""A chain of matrix products and pointwise stages: which loop axes index each tensor, and which stage uses which."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Tensor:
    """axes: the loops that index it. element_bytes: bytes an element, in memory and on chip."""

    name: str
    axes: tuple[str, ...]
    element_bytes: int = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """One product or pointwise step; it runs over every axis of what it reads and writes.

    Axes that the written tensor does not have are summed over. operations: for each point of the axes; a multiply-add
    is two.
    """

    name: str
    reads: tuple[str, ...]
    writes: str
    operations: int = 2


@dataclass(frozen=True)
class Chain:
    """Stages in the order of execution. extents: elements along each axis.

    A tensor that a stage writes and a later one reads is an intermediate and stays on chip; one that nobody reads is a
    result. An axis that a stage sums over is gone for all that depend on its result: a later loop over the same range
    needs a name of its own, for it cannot begin before that sum is complete.
    """

    extents: Mapping[str, int]
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]
    named: dict[str, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", {tensor.name: tensor for tensor in self.tensors})
        for tensor in self.tensors:
            for axis in tensor.axes:
                if axis not in self.extents:
                    raise ValueError(f"tensor {tensor.name}: no extent is given for its axis {axis!r}")
        written: dict[str, str] = {}
        read: dict[str, str] = {}
        for stage in self.stages:
            for name in (*stage.reads, stage.writes):
                if name not in self.named:
                    raise ValueError(f"stage {stage.name}: unknown tensor {name!r}")
            for name in stage.reads:
                read[name] = stage.name
            if stage.writes in written or stage.writes in read:
                raise ValueError(f"stage {stage.name}: {stage.writes} was already read or written before")
            written[stage.writes] = stage.name
        for place, stage in enumerate(self.stages):
            summed = self.axes(stage) - set(self.named[stage.writes].axes)
            for later in self.stages[place + 1 :]:
                again = summed & self.axes(later)
                if again and stage in self.ancestors[later]:
                    raise ValueError(
                        f"stage {later.name}: axis {min(again)!r} is summed over in {stage.name}, on which it depends; "
                        "give the later loop a name of its own"
                    )

    def axes(self, stage: Stage) -> frozenset[str]:
        return frozenset(axis for name in (*stage.reads, stage.writes) for axis in self.named[name].axes)

    @cached_property
    def writer(self) -> dict[str, Stage]:
        return {stage.writes: stage for stage in self.stages}

    @cached_property
    def ancestors(self) -> dict[Stage, tuple[Stage, ...]]:
        """The stages that each stage depends on, directly or not."""
        found: dict[Stage, tuple[Stage, ...]] = {}
        for stage in self.stages:
            direct = [self.writer[name] for name in stage.reads if name in self.writer]
            found[stage] = tuple(dict.fromkeys([*direct, *(above for one in direct for above in found[one])]))
        return found

    @cached_property
    def readers(self) -> dict[str, tuple[Stage, ...]]:
        return {
            tensor.name: tuple(stage for stage in self.stages if tensor.name in stage.reads) for tensor in self.tensors
        }

    def is_intermediate(self, name: str) -> bool:
        return name in self.writer and bool(self.readers[name])

    def runs(self, stage: Stage, axis: str) -> str:
        """In which iterations of a loop the stage runs: "all" of its own axes, else the "first" or the "last".

        The last, where an axis belongs to a stage that it depends on, so that sums over it are complete.
        """
        if axis in self.axes(stage):
            return "all"
        return "last" if any(axis in self.axes(above) for above in self.ancestors[stage]) else "first"

    def elements(self, name: str) -> int:
        total = 1
        for axis in self.named[name].axes:
            total *= self.extents[axis]
        return total

    def bytes(self, name: str) -> int:
        return self.elements(name) * self.named[name].element_bytes

    @property
    def operations(self) -> int:
        """Of all stages."""
        total = 0
        for stage in self.stages:
            points = stage.operations
            for axis in self.axes(stage):
                points *= self.extents[axis]
            total += points
        return total

    def alone(self) -> tuple["Chain", ...]:
        """Each stage as a chain of its own, its intermediates going through memory: the unfused form."""
        return tuple(
            Chain(
                {axis: extent for axis, extent in self.extents.items() if axis in self.axes(stage)},
                tuple(self.named[name] for name in (*stage.reads, stage.writes)),
                (stage,),
            )
            for stage in self.stages
        )
