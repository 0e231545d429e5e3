"""The order of loops and the tiles that move the fewest bytes within a capacity, by ConstrINT."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, permutations
from operator import add, mul

from ..constrint import Expression, Infeasible, Model, ceil_div
from .chain import Chain
from .traffic import Movement, around, held_whole, movement


@dataclass(frozen=True, slots=True)
class Choice:
    """order: outermost loop first; loops of a single turn come last. tiles: elements along each axis."""

    order: tuple[str, ...]
    tiles: Mapping[str, int]
    movement: Movement


def product(parts: Iterable[int | Expression]) -> int | Expression:
    return reduce(mul, parts)


def orders(axes: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Every order of every subset of the axes: those with several turns. The shortest come first."""
    for length in range(len(axes) + 1):
        for chosen in combinations(axes, length):
            yield from permutations(chosen)


def best(chain: Chain, capacity: int, tiles: Mapping[str, Iterable[int]]) -> Choice:
    """The choice that moves the fewest bytes, the first found of several.

    capacity: bytes on chip. tiles: the tile sizes allowed along each axis; its whole extent is always allowed. Raises
    Infeasible where nothing fits.
    """
    chosen: Choice | None = None
    failure: Infeasible | None = None
    for order in orders(tuple(chain.extents)):
        try:
            found = best_in_order(chain, order, capacity, tiles, None if chosen is None else chosen.movement.moved)
        except Infeasible as error:
            failure = failure or error
            continue
        if found is not None:
            chosen = found
    if chosen is None:
        assert failure is not None
        raise failure
    return chosen


def best_in_order(
    chain: Chain, order: Sequence[str], capacity: int, tiles: Mapping[str, Iterable[int]], below: int | None
) -> Choice | None:
    """With several turns of exactly these loops, in this order; None where an axis has no tile for that.

    below: only look for fewer bytes than that.
    """
    rest = tuple(axis for axis in chain.extents if axis not in order)
    model = Model()
    width: dict[str, int | Expression] = {axis: chain.extents[axis] for axis in rest}
    # of one turn nothing is counted
    count: dict[str, int | Expression] = {}
    for axis in order:
        allowed = [tile for tile in tiles[axis] if 0 < tile < chain.extents[axis]]
        if not allowed:
            return None
        width[axis] = model.variable(axis, allowed, order="largest")
        count[axis] = ceil_div(chain.extents[axis], width[axis])
    nest = (*order, *rest)
    several = {axis: 2 if axis in order else 1 for axis in nest}
    moved: list[int | Expression] = []
    held: list[int | Expression] = []
    for stage in chain.stages:
        own = [axis for axis in nest if axis in chain.axes(stage)]
        for name in (*stage.reads, stage.writes):
            tensor = chain.named[name]
            if chain.is_intermediate(name):
                if name == stage.writes:
                    whole = held_whole(chain, tensor, stage, nest, several)
                    sizes = [chain.extents[axis] if axis in whole else width[axis] for axis in tensor.axes]
                    held.append(product([tensor.element_bytes, *sizes]))
                continue
            held.append(product([tensor.element_bytes, *(width[axis] for axis in tensor.axes)]))
            sweeps = product([1, *(count[axis] for axis in around(tensor, own, several))])
            whole_bytes = chain.bytes(name)
            moved.append(sweeps * (2 * whole_bytes) - whole_bytes if name == stage.writes else sweeps * whole_bytes)
    footprint, bytes_ = reduce(add, held), reduce(add, moved)
    # Named so that numbers without variables are constraints too.
    limit = model.constant("capacity", capacity)
    model.add(footprint <= limit, "all buffers fit on chip")
    if below is not None:
        model.add(bytes_ < model.constant("best", below), "fewer bytes than the best so far")
    solution = model.best(bytes_)
    found = {axis: solution[axis] if axis in order else chain.extents[axis] for axis in nest}
    return Choice(nest, found, movement(chain, nest, found))
