"""The portable GPU backend of the delta rule with a decay of each key channel, or with an erase key."""

from types import ModuleType

import torch

from holdfast.kernels.matrix.portable import TritonMatrix
from holdfast.kernels.matrix.variants import SavedShape
from holdfast.kernels.matrix.vector_decay.saved import SavedChunks
from holdfast.planner import Problem
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
    uses_forward_output = True
    refused = (
        ("delta", False, "it has the delta rule alone"),
        (("decay=vector", "erase_key"), False, "it takes one log decay a key channel, or an erase key"),
        (("decay=vector", "decay=scalar"), False, "it takes a log decay"),
        ("normalizer", True, "it has no normaliser"),
    )

    def saved_shape(self, problem: Problem) -> SavedShape | None:
        """What is found of all chunks at once; None of a state in slices."""
        if not triton_model.saves_chunks(problem):
            return None
        dtype = torch.float32 if self.is_in_float32(problem, "forward") else getattr(torch, problem.dtype)
        tokens = (problem[name] for name in "BTH")
        saved = SavedChunks(*tokens, problem["K"], problem["N"] if problem.varlen else None, dtype)
        return SavedShape((1, saved.bytes), torch.uint8)

    def launches(self) -> ModuleType:
        from . import launch

        return launch
