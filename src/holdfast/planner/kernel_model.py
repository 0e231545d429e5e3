"""A kernel's plans as an integer problem: what there is to choose, and what the hardware and the kernel allow.

A kernel's model file declares a `KernelModel` for a call, and says what one assignment of its variables costs;
`planned` makes a candidate of every assignment that the constraints leave and puts them in order.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from .candidate import Candidate
from .constrint import Constraint, Expression, Infeasible, Model, Variable, ceil_div, minimum
from .constrint.constraint import Comparison
from .constrint.expression import Integer, Named, as_expression
from .constrint.model import Order
from .device import Device
from .occupancy import REGISTER_UNIT, RESERVED_SHARED, SHARED_UNIT, WARPS_UNIT, Grid, Limits
from .plan import Direction, Plan
from .problem import Problem
from .report import Report, Row, report_of

Found = TypeVar("Found")
# candidates of a kernel that are weighed against others
KEPT = 12


class Assignment(dict[str, int]):
    """Each variable's value and each named expression's, by name.

    known: what was worked out for other assignments of the same model, to be made once.
    """

    def __init__(self, values: Mapping[str, int], known: dict[object, Any]) -> None:
        super().__init__(values)
        self.known = known

    def once(self, key: object, make: Callable[[], Found]) -> Found:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def plan(self, backend: str, *names: str) -> Plan:
        """Of these values."""
        return Plan(backend, tuple([(name, self[name]) for name in names]))

    def grid(self, blocks: int, of: str = "") -> Grid:
        """The launch of that many blocks, as `KernelModel.block` declared them."""
        warps, registers, shared = (self[named(name, of)] for name in ("warps", "registers", "shared"))
        return Grid(blocks, 32 * warps, registers, shared)


def covering(size: int, least: int = 1) -> int:
    """The power of two, at least `least`, that covers size."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def powers_of_two(least: int, most: int) -> list[int]:
    return [1 << power for power in range((least - 1).bit_length(), most.bit_length())]


def named(what: str, of: str) -> str:
    """What a name says of a kernel of several launches: whose it is."""
    return f"{what} of {of}" if of else what


class KernelModel:
    """Variables and constraints of one call of a kernel on a device.

    Constraints are stated with a label in the words of the hardware, which explain and a rejection show. The order of
    the variables and of their values is that of candidates that are predicted to take equally long.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.solver = Model()
        self.rows: list[Row] = []

    def variable(self, name: str, values: Iterable[int], order: Order = "smallest", greedy: bool = False) -> Variable:
        """An integer to choose; greedy: the first of its values that fits, with those before it as they are."""
        return self.solver.variable(name, values, order, greedy=greedy)

    def let(self, name: str, expression: Integer) -> Named:
        """A name for what follows from the variables, shown by it."""
        return self.solver.let(name, expression)

    def add(self, constraint: Constraint, label: str, unit: str = "") -> None:
        """unit: of both sides, for whoever reads them."""
        self.solver.add(constraint, label)
        self.rows.append(Row(label, unit, constraint))

    def require(self, holds: bool, label: str) -> None:
        """What the call alone decides."""
        self.add(as_expression(int(holds)) == 1, label)

    def block(self, warps: Integer, registers: Integer, shared: Integer, of: str = "") -> None:
        """A launch whose blocks have so many warps, registers a thread and bytes of shared memory: one fits an SM.

        of: which, where a kernel has several.
        """
        limits = Limits.of(self.device)
        warps, registers, shared = (
            self._named(named(name, of), value)
            for name, value in (("warps", warps), ("registers", registers), ("shared", shared))
        )
        memory = min(limits.shared_block, limits.shared_sm // SHARED_UNIT * SHARED_UNIT - RESERVED_SHARED)
        self.add(32 * warps <= min(limits.threads_block, limits.threads_sm), named("threads", of))
        self.add(registers <= limits.registers_thread, named("registers a thread", of))
        self.add(warps <= self._alive(limits.registers_sm, registers), named("warps that registers hold", of))
        self.add(shared <= memory, named("shared memory", of), "bytes")

    def at_once(self, warps: Integer, registers: Integer, shared: Integer) -> Expression:
        """Blocks of such a launch that the whole device runs at once."""
        limits = Limits.of(self.device)
        warps, registers, shared = map(as_expression, (warps, registers, shared))
        held = minimum(
            limits.threads_sm // (32 * warps),
            self.device.blocks_per_sm or 32,
            self._alive(limits.registers_sm, registers) // warps,
            limits.shared_sm // (SHARED_UNIT * ceil_div(shared + RESERVED_SHARED, SHARED_UNIT)),
        )
        return held * self.device.processors

    @staticmethod
    def _alive(registers_sm: int, registers: Expression) -> Expression:
        """Warps of which an SM has the registers, as Grid.per_sm counts them."""
        a_warp = REGISTER_UNIT * ceil_div(32 * registers, REGISTER_UNIT)
        return registers_sm // a_warp // WARPS_UNIT * WARPS_UNIT

    def _named(self, name: str, value: Integer) -> Expression:
        """The value, under its name unless that is its own."""
        value = as_expression(value)
        return value if isinstance(value, Variable | Named) and value.name == name else self.let(name, value)

    def assignments(self) -> Iterator[Assignment]:
        """All that fit, in order."""
        known: dict[object, Any] = {}
        for solution in self.solver.solutions():
            yield Assignment(solution.with_names(self.solver.named), known)

    def clash(self) -> str:
        """In words, what no assignment keeps; empty where one fits."""
        try:
            self.solver.first()
        except Infeasible as error:
            clashing = [row for row in self.rows if any(row.constraint is each for each in error.constraints)]
            # what is counted in bytes is the hardware's, and says most
            told = [row for row in clashing if row.unit][-1:] or clashing[:1]
            others = [row.label for row in clashing if row not in told]
            return " ".join([*map(self._least, told), *([f"(with {', '.join(others)})"] if others else [])])
        return ""

    def _least(self, row: Row) -> str:
        """The constraint at the assignment of all others that comes nearest to it."""
        if not isinstance(row.constraint, Comparison) or row.constraint.sign == "!=":
            return row.label
        goal = row.constraint.left - row.constraint.right
        try:
            found = self.solver.best(goal, minimize=row.constraint.sign in ("<=", "<"), without=row.constraint)
        except Infeasible:
            return row.label
        taken, room = row.sides({each: found[each] for each in self.solver.variables}) or (0, 0)
        return f"{row.label} {taken:,} of {room:,}{row.unit and ' '}{row.unit}"

    def report(self, values: Mapping[str, int]) -> Report:
        fitting = sum(1 for _ in self.solver.solutions())
        return report_of(self.solver.variables, self.solver.named, self.rows, values, fitting)


Declared = Callable[[Problem, Device, Direction], KernelModel]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a model file says of a kernel.

    model: what there is to choose for a call. candidate: an assignment as a plan beside what it should cost. least:
    seconds that an assignment takes at the very least, where most are too slow to be worth predicting; then no two have
    the same plan. only: what is small of the one assignment that becomes a candidate, where one is enough.
    """

    model: Declared
    candidate: Callable[[Problem, Device, Direction, Assignment], Candidate]
    least: Callable[[Problem, Device, Direction, Assignment], float] | None = None
    only: Callable[[Problem, Device, Direction, Assignment], float] | None = None


class NothingFits(tuple[Candidate, ...]):
    """No candidates. reason: works out, in words, which limit no assignment keeps."""

    reason: Callable[[], str]

    @staticmethod
    def because(reason: Callable[[], str]) -> "NothingFits":
        found = NothingFits()
        found.reason = reason
        return found


def why_nothing_fits(candidates: tuple[Candidate, ...]) -> str:
    """Of no candidates, which limit is in the way; empty where no model says."""
    return candidates.reason() if isinstance(candidates, NothingFits) else ""


def planned(
    problem: Problem, device: Device, direction: Direction, *kernels: Kernel, keep: int = KEPT
) -> tuple[Candidate, ...]:
    """The candidates with the shortest predicted times, shortest first, each plan once; of equals the first assignment.

    kernels: that serve the call under one backend's name.
    """
    first: dict[Plan, tuple[Candidate, Kernel, Assignment]] = {}
    for kernel in kernels:
        assignments: Iterable[Assignment] = kernel.model(problem, device, direction).assignments()
        if kernel.only is not None:
            size = partial(kernel.only, problem, device, direction)
            assignments = sorted(assignments, key=size)[:1]
        for values, candidate in _made(kernel, problem, device, direction, assignments, keep):
            first.setdefault(candidate.plan, (candidate, kernel, values))
    if not first:
        return NothingFits.because(lambda: kernels[-1].model(problem, device, direction).clash())
    best = sorted(first.values(), key=lambda made: made[0].seconds)[:keep]
    return tuple(
        replace(candidate, report=partial(_report, kernel.model, problem, device, direction, dict(values)))
        for candidate, kernel, values in best
    )


def _made(
    kernel: Kernel,
    problem: Problem,
    device: Device,
    direction: Direction,
    assignments: Iterable[Assignment],
    keep: int,
) -> Iterable[tuple[Assignment, Candidate]]:
    """Each assignment with its candidate, in order; those left out take longer than `keep` of the others."""
    if kernel.least is None:
        return [(values, kernel.candidate(problem, device, direction, values)) for values in assignments]
    every = [(kernel.least(problem, device, direction, values), values) for values in assignments]
    times: list[float] = []
    made: dict[int, tuple[Assignment, Candidate]] = {}
    for place in sorted(range(len(every)), key=lambda place: every[place][0]):
        least, values = every[place]
        if len(times) >= keep and least > times[keep - 1]:
            break
        made[place] = values, kernel.candidate(problem, device, direction, values)
        insort(times, made[place][1].seconds)
    return [made[place] for place in sorted(made)]


def _report(
    model: Declared, problem: Problem, device: Device, direction: Direction, values: Mapping[str, int]
) -> Report:
    return model(problem, device, direction).report(values)
