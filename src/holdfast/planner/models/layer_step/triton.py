"""One token through a layer: a program a (sequence, head, block of V's columns), then one a row of the norm."""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.decode import triton as decode_model

# keys of a head, taps of a convolution, channels of a row of the norm: what one program holds
MOST = {"K": decode_model.WIDEST, "W": 16, "N": 16384}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first: columns, the block of V's columns; warps. The state's bytes decide, as in `decode`."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Of a vector, whose channels are all alike, there is nothing to choose."""
    return decode_model.model(problem, device, direction) if problem["K"] else KernelModel(device)


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    if not problem["K"]:
        return Candidate(values.plan("triton"))
    return replace(
        decode_model.candidate(problem, device, direction, values), plan=values.plan("triton", "columns", "warps")
    )
