"""What planning costs: a call whose plan is known, against 5 us, and the first plan of each kernel, against 20 ms.

    PYTHONPATH=src python benchmarks/plan_times.py [--device h200]

Warm: from a problem to its backend and plan, which are remembered; beside it from a call's tensors, as inside an op:
the smallest of several means. Cold: a kernel's candidates for one pass of a problem that it has not seen, on a device
that need not be there: the median of five problems of different lengths. Times are of this process alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from holdfast.kernels import select as planning
from holdfast.kernels.backend import Backend, describe
from holdfast.ops import dense, diagonal, matrix, selective
from holdfast.ops.explain import AXES, named_problem
from holdfast.planner import Device, Direction, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes

SIZES = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128, "D": 768, "N": 16}
# whose plans take longest to find: states in slices, and a head over many blocks
LARGE = {"B": 512, "T": 4096, "H": 8, "Hq": 8, "K": 256, "V": 512, "D": 2048, "N": 256}
PRIMITIVES = {
    "inter_chunk_scan": ({"B": 8, "G": 64, "H": 16, "K": 128, "V": 128}, {"B": 4, "H": 16, "K": 64, "V": 64, "r": 4}),
    "intra_chunk": ({"B": 4, "T": 4096, "H": 8, "K": 128, "V": 128, "C": 256},),
}
FAMILIES = {"dense": dense, "diagonal": diagonal, "matrix": matrix, "selective": selective}
LIMIT_US, LIMIT_MS, TRIES = 5.0, 20.0, 5


def microseconds(work: Callable[[], object], runs: int) -> float:
    started = time.process_time()
    for _ in range(runs):
        work()
    return (time.process_time() - started) / runs * 1e6


def problems(op: str, sizes: dict[str, int]) -> Iterator[tuple[tuple[Backend, ...], Problem]]:
    """The same call with a few more tokens or chunks each time."""
    axis = "G" if op == "inter_chunk_scan" else "T"
    for more in range(TRIES):
        yield named_problem(op, sizes | {axis: sizes.get(axis, 64) + more}, torch.bfloat16, True, False)


def cold(device: Device) -> dict[tuple[str, str, Direction], float]:
    """(op, backend, pass) -> milliseconds, the longest of the sizes."""
    calls = [(op, {a: each[a] for a in AXES[RECURRENCES[op].family]}) for op in RECURRENCES for each in (SIZES, LARGE)]
    calls += [(op, sizes) for op, shapes in PRIMITIVES.items() for sizes in shapes]
    found: dict[tuple[str, str, Direction], float] = {}
    for op, sizes in calls:
        tries: dict[tuple[str, str, Direction], list[float]] = {}
        for backends, problem in problems(op, sizes):
            for backend in backends:
                taken = microseconds(lambda: backend.reject(problem, device), 1)  # noqa: B023
                if backend.reject(problem, device) is None:
                    for way in ("forward", "backward"):
                        taken += microseconds(lambda: backend.candidates(problem, device, way), 1)  # noqa: B023
                        tries.setdefault((op, backend.name, way), []).append(taken / 1e3)
                        taken = 0.0
        for key, times in tries.items():
            found[key] = max(found.get(key, 0.0), statistics.median(times))
    return found


def warm(op: str, device: Device) -> tuple[float, float]:
    """Microseconds from a problem to its plan, and from the call's tensors."""
    recurrence, here = RECURRENCES[op], torch.device("cpu")
    family = FAMILIES[recurrence.family]
    call, _ = recurrence.map(**recurrence.example(Draw(0, torch.bfloat16, "meta"), Sizes(**SIZES)))
    problem = family.problem(op, call, None, True)

    def of_call() -> None:
        describe(here)
        planning.resolve(family.BACKENDS, family.problem(op, call, None, True), device, "", "forward")

    def plan() -> None:
        planning.resolve(family.BACKENDS, problem, device, "", "forward")

    plan()
    found, whole = (min(microseconds(work, 2000) for _ in range(5)) for work in (plan, of_call))
    return found, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200", help="a name that Device.named knows")
    device = Device.named(parser.parse_args().device)
    print(f"{'op':<20}{'warm us':>10}{'of a call':>11}   on {device.name}")
    for op in RECURRENCES:
        remembered, of_call = warm(op, device)
        over = f"   over {LIMIT_US:g}" if remembered > LIMIT_US else ""
        print(f"{op:<20}{remembered:>10.1f}{of_call:>11.1f}{over}")
    print(f"\n{'op':<20}{'backend':<14}{'pass':<10}{'cold ms':>8}")
    for (op, backend, way), taken in sorted(cold(device).items(), key=lambda each: -each[1]):
        print(f"{op:<20}{backend:<14}{way:<10}{taken:>8.1f}{f'   over {LIMIT_MS:g}' if taken > LIMIT_MS else ''}")


if __name__ == "__main__":
    main()
