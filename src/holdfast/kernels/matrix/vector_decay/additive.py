"""Vector decay's gradients for the delta rule, by the backend that serves the additive call best."""

from collections.abc import Callable
from functools import cache

from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import MatrixCall

# of a call with other queries, do and the final state's gradient: (q, k, v, g, beta, stabilizer)'s
Gradients = Callable[[MatrixCall, Tensor, Tensor | None], list[Tensor | None]]


def gradients_of(written: MatrixCall, cu_seqlens: Tensor | None) -> Gradients:
    """written: an additive call with a vector decay, whose states all calls have."""
    kernels, forward, backward = _planned(_problem(written, cu_seqlens), describe(written.v.device))
    if isinstance(kernels, TritonGLA):
        return lambda call, do, dfinal: kernels.backward(backward, call, cu_seqlens, do, dfinal)[0]
    _, _, *saved = kernels.forward(forward, written, cu_seqlens)
    return lambda call, do, dfinal: kernels.backward(backward, call, cu_seqlens, do, dfinal, None, *saved)[0]


@cache
def _planned(problem: Problem, device: Device) -> tuple[HopperGLA | TritonGLA, Plan, Plan]:
    hopper = HopperGLA()
    kernels = TritonGLA() if hopper.reject(problem, device) else hopper
    # what interprets Triton's kernels on a CPU has no plan there
    device = device if kernels.reject(problem, device) is None else Device.named("h200")
    forward, backward = (kernels.candidates(problem, device, way)[0].plan for way in ("forward", "backward"))
    return kernels, forward, backward


def _problem(call: MatrixCall, cu_seqlens: Tensor | None) -> Problem:
    batch, length, heads, width = call.v.shape
    sizes = {"B": batch, "T": length, "H": heads, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": width}
    if cu_seqlens is not None:
        sizes["N"] = cu_seqlens.shape[0] - 1
    traits = {"decay=vector": True, "needs_grad": True, "varlen": cu_seqlens is not None}
    return Problem.of("gla", "matrix", call.v.dtype, sizes, traits)
