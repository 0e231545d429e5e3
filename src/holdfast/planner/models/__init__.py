"""What each kernel costs: one file a kernel, named after it, whose `candidates` its backend returns.

A model declares the plans that fit a device as an integer problem and predicts each from the bytes that the kernel
moves, its arithmetic and its chain of dependent steps (`holdfast.planner.kernel_model`). `ranked` puts the candidates
of several in order.
"""

from collections.abc import Iterable

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
