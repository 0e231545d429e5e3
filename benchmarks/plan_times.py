"""What planning costs a call whose plan is known, against the 50 us that it may take, and what it costs the first time.

    PYTHONPATH=src python benchmarks/plan_times.py [--device h200]

Warm: from a call's tensors to its backend and plan, as inside an op: the smallest of several means. Cold: the first
time for that problem, on a device that need not be there. Times are of this process alone, in microseconds.
"""

import argparse
import time
from collections.abc import Callable

import torch

from holdfast.kernels import select as planning
from holdfast.kernels.backend import describe
from holdfast.ops import dense, diagonal, matrix
from holdfast.planner import Device
from holdfast.recurrences import RECURRENCES, Draw, Sizes

FAMILIES = {"dense": dense, "diagonal": diagonal, "matrix": matrix}
SIZES = Sizes(B=4, T=4096, H=32, K=128, V=128, D=768)
LIMIT_US = 50.0


def microseconds(work: Callable[[], object], runs: int) -> float:
    started = time.process_time()
    for _ in range(runs):
        work()
    return (time.process_time() - started) / runs * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200", help="a name that Device.named knows")
    device = Device.named(parser.parse_args().device)
    here = torch.device("cpu")
    print(f"{'op':<20}{'warm us':>10}{'cold us':>12}   on {device.name}")
    for name, recurrence in RECURRENCES.items():
        family = FAMILIES[recurrence.family]
        call, _ = recurrence.map(**recurrence.example(Draw(0, torch.bfloat16, "meta"), SIZES))

        def plan(family=family, name=name, call=call) -> None:
            describe(here)
            planning.resolve(family.BACKENDS, family.problem(name, call, None, True), device, "", "forward")

        cold = []
        for _ in range(3):
            planning.forget()
            cold.append(microseconds(plan, 1))
        warm = min(microseconds(plan, 2000) for _ in range(5))
        print(f"{name:<20}{warm:>10.1f}{min(cold):>12.0f}{'' if warm <= LIMIT_US else f'   over {LIMIT_US:g}'}")


if __name__ == "__main__":
    main()
