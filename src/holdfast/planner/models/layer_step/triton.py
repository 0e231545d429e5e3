"""One token through a layer: a program a (sequence, head, block of V's columns), then one a row of the norm."""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.decode import triton as decode_model

# keys of a head, taps of a convolution, channels of a row of the norm: what one program holds
MOST = {"K": decode_model.WIDEST, "W": 16, "N": 16384}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first: columns, the block of V's columns; warps. The state's bytes decide, as in `decode`."""
    if not problem["K"]:
        # of a vector, whose channels are all alike
        return (Candidate(Plan("triton")),)
    found = decode_model.candidates(problem, device, direction)
    return tuple(replace(each, plan=Plan("triton", each.plan.values)) for each in found)
