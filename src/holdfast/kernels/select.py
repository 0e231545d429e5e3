"""From a problem to the backend and the plan that run it.

One backend runs both passes of a call, since what its forward pass saves need not mean anything to another. Of those
that can serve it, the one with the least predicted time of all passes runs; where no model says, the first. Measured
times win over predicted ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.planner import Candidate, Device, Direction, Plan, Problem, tables
from holdfast.planner.kernel_model import why_nothing_fits

from .backend import Backend, Rejected, no_backend_error, usable


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate of a backend. measured: seconds, where a table has them."""

    backend: Backend
    candidate: Candidate
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Measured or else predicted; infinite where neither is known."""
        return self.candidate.seconds if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Selection:
    """How a call runs.

    chosen: of each pass. ranked: of each pass, every candidate of every backend that can serve the call, the chosen one
    first, then by time. passed_over: backend -> why another runs. ignored: what the table has that does not apply, and
    why.
    """

    chosen: Mapping[Direction, ScoredCandidate]
    ranked: Mapping[Direction, tuple[ScoredCandidate, ...]]
    passed_over: Mapping[str, str]
    ignored: tuple[str, ...]


@lru_cache(maxsize=4096)
def resolve(
    backends: tuple[Backend, ...], problem: Problem, device: Device, name: str | None, direction: Direction
) -> tuple[Backend, Plan]:
    """The backend that runs a pass of the call, and its best plan.

    name: the backend that was asked for, if one was. Raises ValueError for an unknown name and, with every reason, when
    no backend can serve the problem; Rejected, a ValueError, for a named backend that cannot; tables.TableError, a
    ValueError, for a measured table that cannot be read.
    """
    scored = decide(backends, problem, device, name).chosen[direction]
    return scored.backend, scored.candidate.plan


@lru_cache(maxsize=1024)
def decide(backends: tuple[Backend, ...], problem: Problem, device: Device, name: str | None) -> Selection:
    """How every pass of the call runs, and what was weighed. Raises as `resolve` does."""
    directions: tuple[Direction, ...] = ("forward", "backward") if problem.needs_grad else ("forward",)
    serving, reasons = usable(backends, problem, device, name)
    known, ignored = _timings(problem, device, directions)
    by_backend: dict[str, dict[Direction, list[ScoredCandidate]]] = {}
    for backend in serving:
        offered = {direction: backend.candidates(problem, device, direction) for direction in directions}
        found = {
            direction: [
                ScoredCandidate(backend, candidate, known[direction].get(candidate.plan)) for candidate in candidates
            ]
            for direction, candidates in offered.items()
        }
        if empty := [direction for direction in directions if not found[direction]]:
            reasons[backend.name] = f"no plan of its {' and '.join(empty)} fits {device.name}"
            if clash := why_nothing_fits(offered[empty[0]]):
                reasons[backend.name] += f": {clash}"
            if name:
                raise Rejected(
                    f"backend: {name!r} cannot run {problem.op} here: {reasons[backend.name]}", reasons[backend.name]
                )
            continue
        by_backend[backend.name] = found
    if not by_backend:
        raise no_backend_error(problem, device, reasons)
    best = {
        each: {direction: _best(found[direction]) for direction in directions} for each, found in by_backend.items()
    }
    winner = _winner(best)
    for other in by_backend:
        if other != winner:
            reasons[other] = _why_not(best[other], best[winner])
    if name:
        reasons |= {backend.name: f"{name} is forced" for backend in backends if backend.name not in {*reasons, name}}
    weighed = {
        direction: (best[winner][direction], *_others(by_backend, direction, best[winner][direction]))
        for direction in directions
    }
    ignored += _not_offered(weighed, known)
    return Selection(best[winner], weighed, reasons, ignored)


# entries of a cache, of which shapes that change with every call would make ever more
ROOM = 4096


class _Cache(dict[Any, Any]):
    """Begins anew where it is full."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= ROOM and key not in self:
            self.clear()
        super().__setitem__(key, value)


_CACHES: list[_Cache] = []


def clearable_cache() -> dict[Any, Any]:
    """A dict for what is remembered of calls, as what `resolve` said, under a key that is made faster than a Problem;
    `forget` empties it."""
    _CACHES.append(_Cache())
    return _CACHES[-1]


def forget() -> None:
    """Plans every call anew, for a table that has changed."""
    resolve.cache_clear()
    decide.cache_clear()
    for plans in _CACHES:
        plans.clear()


Timings = dict[Direction, dict[Plan, float]]


def _timings(problem: Problem, device: Device, directions: Sequence[Direction]) -> tuple[Timings, tuple[str, ...]]:
    """What the device's table has of the call, and why some of it does not hold."""
    table = tables.table_of(device)
    if table is None:
        return {direction: {} for direction in directions}, ()
    found = {direction: {t.plan: t.seconds for t in table.of(problem, direction)} for direction in directions}
    if any(found.values()) and (reason := table.mismatch(device)):
        return {direction: {} for direction in directions}, (f"the table of {table.device} {reason}",)
    return found, ()


def _best(ranked: Sequence[ScoredCandidate]) -> ScoredCandidate:
    """The fastest measured one; without any, the first."""
    measured = [scored for scored in ranked if scored.measured is not None]
    return min(measured, key=lambda scored: scored.seconds) if measured else ranked[0]


def _total(passes: Mapping[Direction, ScoredCandidate]) -> float:
    return sum(scored.seconds for scored in passes.values())


def _winner(best: Mapping[str, Mapping[Direction, ScoredCandidate]]) -> str:
    """Measured backends win over others; one whose time nobody knows keeps its place in the order."""
    measured = [name for name, passes in best.items() if all(p.measured is not None for p in passes.values())]
    chosen, *others = measured or best
    for name in others:
        if _total(best[name]) < _total(best[chosen]) < float("inf"):
            chosen = name
    return chosen


def _why_not(passes: Mapping[Direction, ScoredCandidate], winning: Mapping[Direction, ScoredCandidate]) -> str:
    winner = next(iter(winning.values())).backend.name
    known, least = _total(passes), _total(winning)
    is_measured = all(scored.measured is not None for scored in winning.values())
    if is_measured and not all(scored.measured is not None for scored in passes.values()):
        return f"was not measured, and {winner} was"
    if known == float("inf") or known <= least:
        return f"{winner} comes first"
    word = "measured" if is_measured else "predicted"
    return f"{word} {_milliseconds(known)}, {winner} {_milliseconds(least)}"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _others(
    by_backend: Mapping[str, Mapping[Direction, list[ScoredCandidate]]], direction: Direction, chosen: ScoredCandidate
) -> list[ScoredCandidate]:
    rest = [scored for found in by_backend.values() for scored in found[direction] if scored is not chosen]
    return sorted(rest, key=lambda scored: scored.seconds)


def _not_offered(weighed: Mapping[Direction, Sequence[ScoredCandidate]], known: Timings) -> tuple[str, ...]:
    """Measured plans that no backend offers any more."""
    notes = []
    for direction, ranked in weighed.items():
        plans = {scored.candidate.plan for scored in ranked}
        served = {plan.backend for plan in plans}
        for plan in known[direction]:
            if plan not in plans:
                reason = (
                    "no candidate of this version" if plan.backend in served else "its backend does not serve this call"
                )
                notes.append(f"{direction}, measured {plan}: {reason}")
    return tuple(notes)
