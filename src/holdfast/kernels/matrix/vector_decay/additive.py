"""Vector decay's gradients for the delta rule, by the backend that serves the additive call best."""

from collections.abc import Callable
from functools import cache

from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.problem import problem
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import MatrixCall

# of a call with other queries, do and the final state's gradient: (q, k, v, g, beta, stabilizer)'s
Gradients = Callable[[MatrixCall, Tensor, Tensor | None], list[Tensor | None]]


def gradients_of(written: MatrixCall, cu_seqlens: Tensor | None) -> Gradients:
    """written: an additive call with a vector decay, whose states all calls have."""
    kernels, forward, backward = _planned(problem("gla", written, cu_seqlens, True), describe(written.v.device))
    if isinstance(kernels, TritonGLA):
        return lambda call, do, dfinal: kernels.backward(backward, call, cu_seqlens, do, dfinal)[0]
    _, _, *saved = kernels.forward(forward, written, cu_seqlens)
    return lambda call, do, dfinal: kernels.backward(backward, call, cu_seqlens, do, dfinal, None, *saved)[0]


@cache
def _planned(what: Problem, device: Device) -> tuple[HopperGLA | TritonGLA, Plan, Plan]:
    hopper = HopperGLA()
    kernels = TritonGLA() if hopper.reject(what, device) else hopper
    forward, backward = (kernels.candidates(what, device, way)[0].plan for way in ("forward", "backward"))
    return kernels, forward, backward
