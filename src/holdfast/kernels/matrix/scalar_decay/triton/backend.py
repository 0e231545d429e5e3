"""The portable GPU backend: one Triton kernel, the state in registers from a sequence's first token to its last."""

from types import ModuleType

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner import Direction, Problem
from holdfast.planner.models.matrix.scalar_decay import triton as triton_model


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

    def is_in_float32(self, problem: Problem, direction: Direction) -> bool:
        is_float16 = problem.dtype == "float16" and "normalizer" in problem.traits
        return super().is_in_float32(problem, direction) or (direction == "backward" and is_float16)
