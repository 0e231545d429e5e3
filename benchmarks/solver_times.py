"""How long ConstrINT takes on problems of a kernel plan's size, against the 20 ms that a plan may take.

    PYTHONPATH=src:tests python benchmarks/solver_times.py [--problems 200]

Times are of this process alone, in milliseconds, the smallest of three, and include writing the model. A row whose
largest time passes the limit says so. Naming a smallest clash takes as many solves as there are constraints; it is done
only when an error's message is read.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from holdfast.planner import Device
from holdfast.planner.constrint import Infeasible
from planner import random_models
from planner.flashrnn_model import Kernel, backward, forward

LIMIT_MS = 20.0


def milliseconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(3):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken) * 1e3


def first(model) -> None:
    with suppress(Infeasible):
        model.first()


def explained(model) -> None:
    try:
        model.first()
    except Infeasible as error:
        str(error)


def flashrnn(sizes: range, solve: Callable[[object], None]) -> Iterator[float]:
    for size in sizes:
        for name in ("rtx3090", "h100"):
            for direction in (forward, backward):
                yield milliseconds(lambda d=direction, n=name, s=size: solve(d(Device.named(n), Kernel(s))))


def plans(problems: int, solve: Callable[[object, object], None]) -> Iterator[float]:
    for seed in range(problems):
        yield milliseconds(lambda seed=seed: solve(*random_models.plan(random.Random(seed))))


def best(model, goal) -> None:
    with suppress(Infeasible):
        model.best(goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200, help="random plans to solve")
    count = parser.parse_args().problems
    cases = {
        "FlashRNN, first or infeasible, D 64 to 3008": flashrnn(range(64, 3009, 32), first),
        "FlashRNN, infeasible ones explained, D 2720 to 3008": flashrnn(range(2720, 3009, 32), explained),
        "random plans, first": plans(count, lambda model, goal: first(model)),
        "random plans, best": plans(count, best),
    }
    print(f"{'problems':<54}{'count':>6}{'median':>9}{'p95':>9}{'largest':>9}  ms")
    for name, times in cases.items():
        found = sorted(times)
        largest = found[-1]
        print(
            f"{name:<54}{len(found):>6}{statistics.median(found):>9.2f}{found[int(len(found) * 0.95)]:>9.2f}"
            f"{largest:>9.2f}{'' if largest <= LIMIT_MS else f'  over {LIMIT_MS:g}'}"
        )


if __name__ == "__main__":
    main()
