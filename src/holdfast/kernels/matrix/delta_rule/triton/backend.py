"""The portable GPU backend of the delta rule: Triton kernels around a state that stays in registers."""

from types import ModuleType

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner.models.matrix.delta_rule import triton as triton_model


class TritonDelta(TritonMatrix):
    """The delta write with a scalar decay or none.

    Forward two launches: each chunk's inverse, all at once, and one walk through the sequence. Backward the inverse
    again, a walk for the states, one back for their gradients, and a launch for the rest of all chunks at once.
    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32 beside bfloat16 inputs, else float64.
    """

    model = triton_model
    refused = (
        ("delta", False, "it has the delta rule alone"),
        ("decay=vector", True, "it takes one log decay a head, not one a key channel"),
        ("normalizer", True, "it has no normaliser"),
        ("erase_key", True, "it has no erase key beside the write key"),
    )

    def launches(self) -> ModuleType:
        from . import launch

        return launch
