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

from .backend import Backend, Rejected, unserved, usable


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate of a backend. measured: seconds, where a table has them."""

    backend: Backend
    candidate: Candidate
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Measured or else predicted; infinite where neither is known."""
        return self.candidate.seconds if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Decision:
    """How a call runs.

    chosen: of each pass. offers: of each pass, every candidate of every backend that can serve the call, the chosen one
    first, then by time. passed_over: backend -> why another runs. ignored: what the table has that does not apply, and
    why.
    """

    chosen: Mapping[Direction, Offer]
    offers: Mapping[Direction, tuple[Offer, ...]]
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
    offer = decide(backends, problem, device, name).chosen[direction]
    return offer.backend, offer.candidate.plan


@lru_cache(maxsize=1024)
def decide(backends: tuple[Backend, ...], problem: Problem, device: Device, name: str | None) -> Decision:
    """How every pass of the call runs, and what was weighed. Raises as `resolve` does."""
    directions: tuple[Direction, ...] = ("forward", "backward") if problem.needs_grad else ("forward",)
    serving, reasons = usable(backends, problem, device, name)
    known, ignored = _timings(problem, device, directions)
    offers: dict[str, dict[Direction, list[Offer]]] = {}
    for backend in serving:
        found = {
            direction: [
                Offer(backend, candidate, known[direction].get(candidate.plan))
                for candidate in backend.candidates(problem, device, direction)
            ]
            for direction in directions
        }
        if empty := [direction for direction in directions if not found[direction]]:
            reasons[backend.name] = f"no plan of its {' and '.join(empty)} fits {device.name}"
            if name:
                raise Rejected(
                    f"backend: {name!r} cannot run {problem.op} here: {reasons[backend.name]}", reasons[backend.name]
                )
            continue
        offers[backend.name] = found
    if not offers:
        raise unserved(problem, device, reasons)
    best = {each: {direction: _best(found[direction]) for direction in directions} for each, found in offers.items()}
    winner = _winner(best)
    for other in offers:
        if other != winner:
            reasons[other] = _why_not(best[other], best[winner])
    if name:
        reasons |= {backend.name: f"{name} is forced" for backend in backends if backend.name not in {*reasons, name}}
    weighed = {
        direction: (best[winner][direction], *_others(offers, direction, best[winner][direction]))
        for direction in directions
    }
    ignored += _unknown(weighed, known)
    return Decision(best[winner], weighed, reasons, ignored)


_REMEMBERED: list[dict[Any, Any]] = []


def remembered() -> dict[Any, Any]:
    """A dict for what `resolve` said, under a key that is made faster than a Problem; `forget` empties it."""
    _REMEMBERED.append({})
    return _REMEMBERED[-1]


def forget() -> None:
    """Plans every call anew, for a table that has changed."""
    resolve.cache_clear()
    decide.cache_clear()
    for plans in _REMEMBERED:
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


def _best(offers: Sequence[Offer]) -> Offer:
    """The fastest measured one; without any, the first."""
    measured = [offer for offer in offers if offer.measured is not None]
    return min(measured, key=lambda offer: offer.seconds) if measured else offers[0]


def _total(passes: Mapping[Direction, Offer]) -> float:
    return sum(offer.seconds for offer in passes.values())


def _winner(best: Mapping[str, Mapping[Direction, Offer]]) -> str:
    """Measured backends win over others; one whose time nobody knows keeps its place in the order."""
    measured = [name for name, passes in best.items() if all(p.measured is not None for p in passes.values())]
    chosen, *others = measured or best
    for name in others:
        if _total(best[name]) < _total(best[chosen]) < float("inf"):
            chosen = name
    return chosen


def _why_not(passes: Mapping[Direction, Offer], winning: Mapping[Direction, Offer]) -> str:
    winner = next(iter(winning.values())).backend.name
    known, least = _total(passes), _total(winning)
    is_measured = all(offer.measured is not None for offer in winning.values())
    if is_measured and not all(offer.measured is not None for offer in passes.values()):
        return f"was not measured, and {winner} was"
    if known == float("inf") or known <= least:
        return f"{winner} comes first"
    word = "measured" if is_measured else "predicted"
    return f"{word} {_milliseconds(known)}, {winner} {_milliseconds(least)}"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _others(offers: Mapping[str, Mapping[Direction, list[Offer]]], direction: Direction, chosen: Offer) -> list[Offer]:
    rest = [offer for found in offers.values() for offer in found[direction] if offer is not chosen]
    return sorted(rest, key=lambda offer: offer.seconds)


def _unknown(weighed: Mapping[Direction, Sequence[Offer]], known: Timings) -> tuple[str, ...]:
    """Measured plans that nobody offers any more."""
    notes = []
    for direction, offers in weighed.items():
        plans = {offer.candidate.plan for offer in offers}
        served = {plan.backend for plan in plans}
        for plan in known[direction]:
            if plan not in plans:
                reason = (
                    "no candidate of this version" if plan.backend in served else "its backend does not serve this call"
                )
                notes.append(f"{direction}, measured {plan}: {reason}")
    return tuple(notes)
