"""States wider than a kernel's, in slices: V's columns as heads of their own, K's rows one launch after another.

Columns of V do not know of one another in any matrix recurrence. Rows of K do not in the additive ones, whose outputs
are sums over them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Model, ceil_div, maximum, truth
from holdfast.planner.floors import ELEMENT_BYTES
from holdfast.planner.models import ranked
from holdfast.planner.models.matrix.tiles import WIDEST

# of V's slices; the widest that a kernel takes, and those of the tiles
WIDTHS = (256, 128, 64)
# rows of 16 bytes, which TMA copies
ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How many slices K and V come in. A plan's values of the same names."""

    key_slices: int = 1
    value_slices: int = 1

    @staticmethod
    def of(plan: Plan) -> "Cut":
        values = dict(plan.values)
        return Cut(values.get("key_slices", 1), values.get("value_slices", 1))

    def planned(self, plan: Plan) -> Plan:
        """A slice's plan, with the slices in it."""
        return Plan(plan.backend, (*plan.values, ("key_slices", self.key_slices), ("value_slices", self.value_slices)))

    def rows(self, keys: int) -> list[slice]:
        """K's slices; the last may be narrower."""
        width = keys if self.key_slices == 1 else _aligned(-(-keys // self.key_slices))
        return [slice(first, min(first + width, keys)) for first in range(0, keys, width)]

    def columns(self, values: int) -> int:
        """Of one of V's slices. All are as wide: if the number does not divide V, the last is filled up."""
        return (
            values // self.value_slices
            if values % self.value_slices == 0
            else _aligned(-(-values // self.value_slices))
        )


WHOLE = Cut()


def _aligned(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED


def cuts(problem: Problem, rows: bool) -> tuple[Cut, ...]:
    """The ways to cut a call, where K or V is wider than the tiles. rows: whether K may be."""
    return _cuts(problem["K"] if rows else 1, problem["V"])


@lru_cache(maxsize=256)
def _cuts(K: int, V: int) -> tuple[Cut, ...]:
    model = Model()
    # 2: slices of V are equal, of rows of 16 bytes; 1: they are equal; 0: the last is filled up
    width = model.variable("width", {V, *WIDTHS}, "largest")
    even = model.variable("even", (0, 1, 2), "largest", greedy=True)
    values = model.variable("value_slices", range(1, 2 * -(-V // WIDTHS[-1]) + 1), greedy=True)
    model.add(width <= V)
    fewest = ceil_div(V, width)
    model.add(values >= fewest)
    model.add(values <= maximum(fewest, truth(even > 0) * (2 * fewest - 1)))
    unit = values * (1 + (ALIGNED - 1) * truth(even == 2))
    model.add(truth(even > 0) * (V - V // unit * unit) == 0)
    keys = model.variable("key_slices", (1, key_slices(K)))
    model.add(keys * values >= 2)
    found = dict.fromkeys(Cut(each["key_slices"], each["value_slices"]) for each in model.solutions())
    return tuple(sorted(found, key=lambda cut: cut.key_slices))


def key_slices(K: int) -> int:
    """Of rows that all take the same tile, the fewest. K: where a call is traced, a number that stands for many."""
    return 1 if K <= WIDEST else _key_slices(int(K))


@lru_cache(maxsize=256)
def _key_slices(K: int) -> int:
    model = Model()
    slices = model.variable("slices", range(-(-K // WIDEST), -(-K // ALIGNED) + 1))
    width = ceil_div(ceil_div(K, slices), ALIGNED) * ALIGNED
    last = K - (ceil_div(K, maximum(1, width)) - 1) * width
    model.add(truth(width > WIDEST // 2) == truth(last > WIDEST // 2))
    return model.first()["slices"]


def sliced(problem: Problem, cut: Cut) -> Problem:
    """The problem of the first slice of K, with V's slices as heads.

    Traits: "slices", and "key_slices" where its output is a part of a sum.
    """
    K, V = problem["K"], problem["V"]
    first, *_ = cut.rows(K)
    sizes = dict(problem.sizes) | {"H": problem["H"] * cut.value_slices, "K": first.stop, "V": cut.columns(V)}
    traits = problem.traits | {"slices"} | ({"key_slices"} if cut.key_slices > 1 else set())
    return replace(problem, sizes=tuple(sizes.items()), traits=traits)


def candidates(
    problem: Problem,
    device: Device,
    direction: Direction,
    cut: Cut,
    of_slice: Callable[[Problem, Device, Direction], tuple[Candidate, ...]],
) -> tuple[Candidate, ...]:
    """Plans in such slices, the fastest first. of_slice: the kernel's own."""
    found = of_slice(sliced(problem, cut), device, direction)
    return ranked(_whole(problem, device, direction, cut, each) for each in found) or found


def _whole(problem: Problem, device: Device, direction: Direction, cut: Cut, found: Candidate) -> Candidate:
    """All slices of K, and what adds them up."""
    whole = found
    for _ in range(cut.key_slices - 1):
        whole = found.after(whole)
    if moved := _added(problem, direction, cut):
        sums = Candidate.of(found.plan, device, Grid(device.processors, 128, 32), moved, 0, tensor_cores=False)
        whole = sums.after(whole)
    return replace(
        found,
        plan=cut.planned(found.plan),
        prediction=whole.prediction,
        moved=whole.moved,
        operations=whole.operations,
    )


def _added(problem: Problem, direction: Direction, cut: Cut) -> int:
    """Bytes that the sums over slices move."""
    B, T, H, Hq, K, V = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    size, more = ELEMENT_BYTES[problem.dtype], cut.key_slices - 1
    tokens, columns = B * T, cut.columns(V) * cut.value_slices
    # of o, in float32 from one slice of K to the next
    moved = more * 8 * tokens * H * columns
    if direction == "forward":
        return moved
    moved = more * 3 * size * tokens * H * columns
    if H * cut.value_slices > Hq:
        moved += 2 * size * tokens * K * (H * cut.value_slices + Hq)
    if "decay=vector" in problem.traits and cut.value_slices > 1:
        moved += 4 * tokens * K * H * (cut.value_slices + 1)
    return moved
