"""torch.compile of the plain loop over steps, which it unrolls."""

import torch

from ..case import Case
from ..subject import Refused, Subject

LONGEST = 64


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """Only short sequences: the compile time grows with the unrolled loop."""
    sizes = dict(case.sizes)
    # inter_chunk_scan steps over chunks
    if sizes.get("G", sizes.get("T", 0)) > LONGEST:
        raise Refused(f"unrolls the loop over steps: measured up to {LONGEST} steps only")
    options = dict(case.options)
    loop = case.work.exact
    compiled = torch.compile(lambda a: loop(a, options))
    return Subject(case.arguments(device), compiled, lambda a: loop(a, options))
