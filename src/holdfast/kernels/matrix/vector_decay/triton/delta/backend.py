"""The portable GPU backend of the delta rule with a decay of each key channel, or with an erase key."""

from types import ModuleType

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.planner.models.matrix.vector_decay import delta as triton_model


class TritonKDA(TritonMatrix):
    """Vector decay, delta write; an erase key may read before the decay or after it.

    Beside an erase key a scalar decay is served too, as one of each key channel.

    Forward four launches: the decayed q and k and their products, of queries and of keys, the inverses of all chunks,
    and one pass over the sequence. Backward these again, one pass back, and vector decay's launch of gradients twice.
    Where vector decay's kernels on Hopper serve the sizes, the first two are one of theirs, and so is the last. Tensor
    cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32.
    """

    model = triton_model
    refused = (
        ("delta", False, "it has the delta rule alone"),
        (("decay=vector", "erase_key"), False, "it takes one log decay a key channel, or an erase key"),
        (("decay=vector", "decay=scalar"), False, "it takes a log decay"),
        ("normalizer", True, "it has no normaliser"),
    )

    def launches(self) -> ModuleType:
        from . import launch

        return launch
