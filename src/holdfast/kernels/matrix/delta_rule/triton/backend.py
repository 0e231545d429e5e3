"""The portable GPU backend of the delta rule: Triton kernels around a state that stays in registers."""

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.delta_rule import triton as triton_model
from holdfast.recurrences.definition import MatrixCall

# K and V of a head whose launches wait for neither memory nor tensor cores
_SMALL = 16, 64


class TritonDelta(TritonMatrix):
    """The delta write with a scalar decay or none.

    Forward two launches: each chunk's inverse, all at once, and one walk through the sequence. Backward the inverse
    again, a walk for the states, one back for their gradients, and a launch for the rest of all chunks at once.
    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32 beside bfloat16 inputs, else float64. Small heads are float32's, rounded: a
    state or gradient of so few numbers shows each operand's rounding, which no decay takes away.
    """

    model = triton_model
    refused = (
        ("delta", False, "it has the delta rule alone"),
        ("decay=vector", True, "it takes one log decay a head, not one a key channel"),
        ("normalizer", True, "it has no normaliser"),
    )

    def launches(self) -> ModuleType:
        from . import launch

        return launch

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        if _is_small(problem["K"], problem["V"]):
            problem = replace(problem, dtype="float32")
        return super().candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        o, final = super().forward(plan, _widened(call), cu_seqlens)
        return o.to(call.v.dtype), final

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        wide, dtype = _widened(call), call.v.dtype
        grad_o = None if grad_o is None else grad_o.to(wide.v.dtype)
        grads, grad_state = super().backward(plan, wide, cu_seqlens, grad_o, grad_final)
        return [*(x.to(dtype) for x in grads[:3]), *grads[3:]], grad_state


def _widened(call: MatrixCall) -> MatrixCall:
    """The call, of a small head in float32."""
    if not _is_small(call.k.shape[3], call.v.shape[3]):
        return call
    return call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())


def _is_small(keys: int, values: int) -> bool:
    return keys <= _SMALL[0] and values <= _SMALL[1]
