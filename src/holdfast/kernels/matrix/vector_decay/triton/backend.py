"""The portable GPU backend of a vector decay: all chunks prepared at once, then chunk by chunk with S in registers."""

from types import ModuleType

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner.models.matrix.vector_decay import triton as triton_model


class TritonGLA(TritonMatrix):
    """Vector decay, additive write.

    Forward two launches: the scores and the decayed q and k of all chunks at once, and one pass over the sequence.
    Backward the first again, a pass for the states, one back for their gradients and dv, and a launch for the rest of
    all chunks at once. Tensor cores take operands in the inputs' dtype (float32 as three TF32 products,
    "3xTF32") and add in float32; decays are products of float32 numbers of at most 1.
    """

    model = triton_model
    refused = (
        ("decay=vector", False, "it takes one log decay a key channel"),
        ("delta", True, "it has no delta rule"),
        ("normalizer", True, "it has no normaliser"),
    )

    def launches(self) -> ModuleType:
        from . import launch

        return launch
