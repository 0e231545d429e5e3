"""One allocation for all the memory that a replay's launches pass on among themselves, in place of one each."""

import math
from typing import Any

import torch

from .recording import Allocation, Launch

# of PyTorch's own allocations on a GPU
ALIGNMENT = 512


class _LiveInterval:
    """Bytes from start to stop of the arena, in use from one step to another."""

    def __init__(self, allocation: Allocation, since: int, until: int) -> None:
        self.slot, self.since, self.until = allocation.slot, since, until
        size = math.prod(allocation.shape) * allocation.dtype.itemsize
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self.start = 0


def pack_arena(steps: list[Any], output_slots: set[int]) -> list[Any]:
    """steps, with one allocation for all that only launches work on. output_slots: slots that outlive the steps."""
    last = {slot: n for n, step in enumerate(steps) for slot in step.reads}
    others = {slot for step in steps if not isinstance(step, Launch) for slot in step.reads}
    pieces = [
        _LiveInterval(step, n, last[step.slot])
        for n, step in enumerate(steps)
        if isinstance(step, Allocation) and step.slot in last and step.slot not in output_slots | others
    ]
    if len(pieces) < 2:
        return steps
    for n, piece in enumerate(pieces):
        beside = sorted((x.start, x.start + x.size) for x in pieces[:n] if x.until >= piece.since)
        for start, stop in beside:
            if piece.start + piece.size <= start:
                break
            piece.start = max(piece.start, stop)
    first = pieces[0]
    size = max(x.start + x.size for x in pieces)
    arena = Allocation(first.slot, (size,), (1,), torch.uint8, steps[first.since].device)
    starts = {x.slot: x.start for x in pieces}
    found: list[Any] = []
    for n, step in enumerate(steps):
        if n == first.since:
            found.append(arena)
        elif isinstance(step, Launch):
            found.append(step.moved(starts, first.slot))
        elif not (isinstance(step, Allocation) and step.slot in starts):
            found.append(step)
    return found
