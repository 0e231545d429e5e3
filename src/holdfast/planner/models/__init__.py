"""What each kernel costs: one file a kernel, named after it, whose `candidates` its backend returns.

A model lists the plans that fit a device and predicts each from the bytes that the kernel moves, its arithmetic and its
chain of dependent steps. `ranked` puts them in order; `fastest` does too, where most are too slow to be worth making.
"""

from bisect import insort
from collections.abc import Callable, Iterable

from ..candidate import Candidate
from ..plan import Plan


def ranked(candidates: Iterable[Candidate], keep: int = 12) -> tuple[Candidate, ...]:
    """The candidates with the shortest predicted times, shortest first, each plan once.

    Of equals, the one that was given first.
    """
    first: dict[Plan, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.plan, candidate)
    return tuple(sorted(first.values(), key=lambda candidate: candidate.seconds)[:keep])


def fastest(ways: Iterable[tuple[float, Callable[[], Candidate]]], keep: int = 12) -> tuple[Candidate, ...]:
    """As `ranked`, of many ways to run a pass; only candidates that may be among them are made.

    ways: seconds that a way takes at least, and what makes its candidate, whose plan no other way has.
    """
    times: list[float] = []
    made: dict[int, Candidate] = {}
    for place, (least, make) in sorted(enumerate(ways), key=lambda way: way[1][0]):
        if len(times) >= keep and least > times[keep - 1]:
            break
        made[place] = make()
        insort(times, made[place].seconds)
    # in the order in which they were given
    return ranked((made[place] for place in sorted(made)), keep)
