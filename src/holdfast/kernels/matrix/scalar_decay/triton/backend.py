"""The portable GPU backend: one Triton kernel, the state in registers from a sequence's first token to its last."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.scalar_decay import triton as triton_model
from holdfast.recurrences.definition import MatrixCall


class TritonSinglePass(TritonMatrix):
    """Scalar decay or none, additive write. Forward one sweep, backward three.

    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32, float64 beside float32 inputs. With a normaliser float16's gradients are
    float32's, rounded: an output is divided by as little as eps, which takes its gradient's weights past float16.
    """

    model = triton_model
    refused = (
        ("decay=vector", True, "it takes one log decay a head, not one a key channel"),
        ("delta", True, "it has no delta rule"),
    )

    def launches(self) -> ModuleType:
        from . import launch

        return launch

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        if direction == "backward" and problem.dtype == "float16" and "normalizer" in problem.traits:
            problem = replace(problem, dtype="float32")
        return super().candidates(problem, device, direction)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        if call.stabilizer is None or call.v.dtype != torch.float16:
            return super().backward(plan, call, cu_seqlens, grad_o, grad_final)
        wide = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
        grad_o = None if grad_o is None else grad_o.float()
        grads, grad_state = super().backward(plan, wide, cu_seqlens, grad_o, grad_final)
        return [*(x.to(torch.float16) for x in grads[:3]), *grads[3:]], grad_state
