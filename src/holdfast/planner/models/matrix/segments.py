"""Sequences cut into segments, whose chunks one block walks over: how long they may be."""

from holdfast.planner import Problem
from holdfast.planner.constrint import Expression, Variable, ceil_div
from holdfast.planner.kernel_model import KernelModel, powers_of_two

from .tiles import CHUNK


def chunks_of(problem: Problem) -> int:
    """Of a sequence; one where there is no token."""
    return max(1, -(-problem["T"] // CHUNK))


def cut_in_segments(model: KernelModel, problem: Problem) -> tuple[Variable, Expression]:
    """The parts of the sequence, which is cut in two again as long as blocks are too few, and the chunks of each."""
    segments = model.variable("segments", powers_of_two(1, 1024))
    model.add(segments <= chunks_of(problem), "segments, of chunks")
    pairs = problem["B"] * problem["H"]
    model.add(segments // 2 * pairs < model.device.processors, "blocks of half as many segments")
    return segments, ceil_div(chunks_of(problem), segments)
