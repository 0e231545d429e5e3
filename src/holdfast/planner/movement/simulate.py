"""The same by brute force: runs the loop nest tile by tile, keeps the buffers, and counts."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from .chain import Chain
from .traffic import Movement, check, turns

Tile = tuple[int, ...]


class Incomplete(Exception):
    """A stage read an intermediate that was not there or not complete: the nest does not compute the chain."""


def simulate(chain: Chain, order: Sequence[str], tiles: Mapping[str, int]) -> Movement:
    """What traffic.movement predicts, counted. Takes one step for every combination of tiles."""
    check(chain, order, tiles)
    count = turns(chain, tiles)
    axes = {stage: chain.axes(stage) for stage in chain.stages}
    runs = {(stage, axis): chain.runs(stage, axis) for stage in chain.stages for axis in order}

    def size(name: str, tile: Tile) -> int:
        """Bytes of one tile, shorter at the end of an axis."""
        tensor = chain.named[name]
        lengths = [
            min(tiles[axis], chain.extents[axis] - place * tiles[axis])
            for axis, place in zip(tensor.axes, tile, strict=True)
        ]
        return tensor.element_bytes * prod(lengths)

    read: dict[str, int] = {}
    written: dict[str, int] = {}
    largest: dict[tuple[str, str], int] = {}
    buffered: dict[tuple[str, str], Tile] = {}
    seen: set[tuple[str, Tile]] = set()
    # Of intermediates, by tensor and tile: additions still to come, and reads still to come.
    additions: dict[tuple[str, Tile], int] = {}
    uses: dict[tuple[str, Tile], int] = {}
    live: dict[str, int] = {}

    def visit(stage_name: str, name: str, tile: Tile, is_result: bool) -> None:
        key = (stage_name, name)
        if buffered.get(key) == tile:
            return
        bytes_ = size(name, tile)
        if not is_result or (name, tile) in seen:
            read[name] = read.get(name, 0) + bytes_
        if is_result:
            seen.add((name, tile))
            written[name] = written.get(name, 0) + bytes_
        buffered[key] = tile
        largest[key] = max(largest.get(key, 0), bytes_)

    def consume(name: str, tile: Tile) -> None:
        if additions.get((name, tile)) != 0 or not uses.get((name, tile)):
            raise Incomplete(f"{name}{list(tile)}")
        uses[name, tile] -= 1
        if uses[name, tile] == 0:
            live[name] -= size(name, tile)

    def add(name: str, tile: Tile, summed: int, reads: int) -> None:
        if (name, tile) not in additions:
            additions[name, tile] = summed
            uses[name, tile] = reads
            live[name] = live.get(name, 0) + size(name, tile)
            largest["", name] = max(largest.get(("", name), 0), live[name])
        additions[name, tile] -= 1

    for point in product(*(range(count[axis]) for axis in order)):
        at = dict(zip(order, point, strict=True))
        for stage in chain.stages:
            when = {"first": lambda axis: 0, "last": lambda axis: count[axis] - 1, "all": at.get}
            if any(at[axis] != when[runs[stage, axis]](axis) for axis in order):
                continue
            for name in (*stage.reads, stage.writes):
                tensor = chain.named[name]
                tile = tuple(at[axis] for axis in tensor.axes)
                if not chain.is_intermediate(name):
                    visit(stage.name, name, tile, is_result=name == stage.writes)
                elif name == stage.writes:
                    summed = prod(count[axis] for axis in axes[stage] - set(tensor.axes))
                    reads = sum(
                        prod(count[axis] for axis in axes[reader] - set(tensor.axes)) for reader in chain.readers[name]
                    )
                    add(name, tile, summed, reads)
                else:
                    consume(name, tile)
    for name in written:
        read.setdefault(name, 0)
    buffers: dict[str, int] = {}
    for (_, name), bytes_ in largest.items():
        buffers[name] = buffers.get(name, 0) + bytes_
    return Movement(read, written, buffers)
