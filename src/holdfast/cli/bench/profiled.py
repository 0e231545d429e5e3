"""A child process that runs each case that it is asked for once between two marks, for a profiler.

ncu --profile-from-start off ... python -m holdfast.cli.bench.profiled REQUEST
"""

import json

import torch

from .case import Case
from .child import request
from .counters import SWEEP_BYTES
from .failure import one_line
from .measure import one_pass
from .subject import Runner


def _profile(case: Case, runner: Runner, device: torch.device) -> None:
    """Two runs to compile and prepare, a sweep that leaves nothing of them in the L2 cache, then the run that counts
    and one more sweep, whose writes are what the run left in the cache."""
    subject = runner.prepare(case, device)
    run = one_pass(subject.call, subject.inputs, case.passes != "fwd")
    run()
    run()
    sweep = torch.zeros(SWEEP_BYTES // 4, dtype=torch.int32, device=device)
    sweep.amax()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    kept = run()
    sweep.amax()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()
    del kept


def main() -> None:
    """Prints {"profiled": ..., "failed": ""}, or the error in words, a line a case."""
    wanted, device = request()
    for case, runner in wanted:
        failed = ""
        try:
            _profile(case, runner, device)
        except Exception as error:  # the parent notes it beside the row
            failed = one_line(error)
        print(json.dumps({"profiled": f"{case} {runner.name}", "failed": failed}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
