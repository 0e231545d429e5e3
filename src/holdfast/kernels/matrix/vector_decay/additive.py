"""Vector decay's gradients for the delta rule, by the backend that serves the additive call best."""

from collections.abc import Callable
from functools import cache

from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import MatrixCall

# of a call with other queries, do and the final state's gradient: (q, k, v, g, beta, stabilizer)'s
Gradients = Callable[[MatrixCall, Tensor, Tensor | None], list[Tensor | None]]


def gradients_of(written: MatrixCall, plan: Plan, cu_seqlens: Tensor | None) -> Gradients:
    """written: an additive call with a vector decay, whose states all calls have. plan: of the portable kernels."""
    plans = _on_hopper(_problem(written, cu_seqlens), describe(written.v.device))
    if plans is None:
        from holdfast.kernels.matrix.vector_decay.triton import launch

        return lambda call, do, dfinal: launch.backward(plan, call, cu_seqlens, do, dfinal)[0]
    forward, backward = plans
    kernels = HopperGLA()
    _, _, *saved = kernels.forward(forward, written, cu_seqlens)
    return lambda call, do, dfinal: kernels.backward(backward, call, cu_seqlens, do, dfinal, None, *saved)[0]


@cache
def _on_hopper(problem: Problem, device: Device) -> tuple[Plan, Plan] | None:
    if HopperGLA().reject(problem, device) is not None:
        return None
    forward, backward = (HopperGLA().candidates(problem, device, way)[0].plan for way in ("forward", "backward"))
    return forward, backward


def _problem(call: MatrixCall, cu_seqlens: Tensor | None) -> Problem:
    batch, length, heads, width = call.v.shape
    sizes = {"B": batch, "T": length, "H": heads, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": width}
    if cu_seqlens is not None:
        sizes["N"] = cu_seqlens.shape[0] - 1
    traits = {"decay=vector": True, "needs_grad": True, "varlen": cu_seqlens is not None}
    return Problem.of("gla", "matrix", call.v.dtype, sizes, traits)
