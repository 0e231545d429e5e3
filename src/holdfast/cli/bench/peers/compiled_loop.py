"""torch.compile of the plain loop over steps, which it unrolls."""

import torch

from ..case import Case
from ..subject import Refused, Subject

# steps; compiling them takes seconds on a GPU, minutes on a CPU
LONGEST = {"cuda": 64, "cpu": 8}


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """Only short sequences: the compile time grows with the unrolled loop."""
    sizes = dict(case.sizes)
    # inter_chunk_scan steps over chunks
    longest = LONGEST.get(device.type, LONGEST["cpu"])
    if sizes.get("G", sizes.get("T", 0)) > longest:
        raise Refused(f"unrolls the loop over steps: measured up to {longest} steps only")
    options = dict(case.options)
    loop = case.work.exact
    # past 8 compilations of one function the compiler gives up; each case is a new one
    torch.compiler.reset()
    compiled = torch.compile(lambda a: loop(a, options))
    return Subject(case.arguments(device), compiled, lambda a: loop(a, options), shared=True)
