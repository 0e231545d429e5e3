"""The portable GPU backend: one Triton kernel, the state in registers from a sequence's first token to its last."""

from holdfast.planner.models import matrix_triton_single_pass
from holdfast.recurrences.definition import MatrixCall

from .triton_matrix import TritonMatrix


class TritonSinglePass(TritonMatrix):
    """Scalar decay or none, additive write. Forward one sweep, backward three.

    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32, float64 beside float32 inputs.
    """

    model = matrix_triton_single_pass
    passes = "triton_passes"
    refused = (
        ("decay=vector", True, "it takes one log decay a head, not one a key channel"),
        ("delta", True, "it has no delta rule"),
    )

    def takes(self, call: MatrixCall) -> bool:
        return not call.delta and (call.g is None or call.g.dim() == 3)
