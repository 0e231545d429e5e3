"""What a tiled chain moves between memory and chip, and what it holds on chip: closed forms.

The chain runs as one nest of loops over tiles, in a given order, outermost first. A stage skips the loops of axes that
it does not have. Every tensor in memory has a buffer of one tile at each stage that uses it, which is filled (or, of a
result, written back) when the tile changes. That happens once for each turn of the innermost loop that indexes the
tensor and of all loops around it, loops of a single turn aside; so its elements move as often as those loops around
that do not index it have turns. A result's tile that comes back is read again, for its partial sums.

An intermediate lies between two stages that skip, or have to themselves, different loops. All of it that is
produced inside the outermost such loop is on chip at once; of the loops around that one, one tile's worth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .chain import Chain, Stage, Tensor


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes. read, written: by tensor, those in memory only. buffers: on chip, by tensor, summed over its stages."""

    read: Mapping[str, int]
    written: Mapping[str, int]
    buffers: Mapping[str, int]

    @property
    def moved(self) -> int:
        """Bytes through memory, reads and writes."""
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def footprint(self) -> int:
        """Bytes on chip."""
        return sum(self.buffers.values())


def turns(chain: Chain, tiles: Mapping[str, int]) -> dict[str, int]:
    """How many tiles each axis has."""
    return {axis: -(-extent // tiles[axis]) for axis, extent in chain.extents.items()}


def around(tensor: Tensor, loops: Sequence[str], count: Mapping[str, int]) -> tuple[str, ...]:
    """The loops that do not index the tensor, around the innermost one that does and has several turns."""
    last = max((place for place, axis in enumerate(loops) if axis in tensor.axes and count[axis] > 1), default=0)
    return tuple(axis for axis in loops[:last] if axis not in tensor.axes and count[axis] > 1)


def held_whole(
    chain: Chain, tensor: Tensor, writer: Stage, order: Sequence[str], count: Mapping[str, int]
) -> tuple[str, ...]:
    """Of an intermediate, the axes along which all of it is on chip at once, not one tile."""
    for place, axis in enumerate(order):
        if axis in tensor.axes or count[axis] == 1:
            continue
        modes = {chain.runs(stage, axis) for stage in (writer, *chain.readers[tensor.name])}
        if len(modes) > 1 or modes == {"all"}:
            return tuple(inner for inner in order[place:] if inner in tensor.axes)
    return ()


def check(chain: Chain, order: Sequence[str], tiles: Mapping[str, int]) -> None:
    if sorted(order) != sorted(chain.extents):
        raise ValueError(f"order: expected each of {', '.join(chain.extents)} once; got {', '.join(order)}")
    for axis in order:
        if tiles.get(axis, 0) < 1:
            raise ValueError(f"tiles: expected a positive tile for axis {axis}; got {tiles.get(axis)}")


def movement(chain: Chain, order: Sequence[str], tiles: Mapping[str, int]) -> Movement:
    """Of the chain in that order of loops, outermost first, with tiles of so many elements along each axis."""
    check(chain, order, tiles)
    count = turns(chain, tiles)
    width = {axis: min(tiles[axis], extent) for axis, extent in chain.extents.items()}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for stage in chain.stages:
        own = [axis for axis in order if axis in chain.axes(stage)]
        for name in (*stage.reads, stage.writes):
            tensor = chain.named[name]
            if chain.is_intermediate(name):
                if name == stage.writes:
                    whole = held_whole(chain, tensor, stage, order, count)
                    sizes = [chain.extents[axis] if axis in whole else width[axis] for axis in tensor.axes]
                    buffers[name] = tensor.element_bytes * prod(sizes)
                continue
            sweeps = prod(count[axis] for axis in around(tensor, own, count))
            tile = tensor.element_bytes * prod(width[axis] for axis in tensor.axes)
            buffers[name] = buffers.get(name, 0) + tile
            if name == stage.writes:
                written[name] = chain.bytes(name) * sweeps
                read[name] = chain.bytes(name) * (sweeps - 1)
            else:
                read[name] = read.get(name, 0) + chain.bytes(name) * sweeps
    return Movement(read, written, buffers)
