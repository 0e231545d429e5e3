"""The layers of a language model over processes that share them: heads of mixers, channels of MLPs."""

import logging

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from .errors import UserError
from .language_model import LanguageModel


def share_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Changes the model; embedding, norms and head stay whole. Raises UserError for what does not divide."""
    from holdfast.parallel import Cut, HeadwiseParallel, Sections, tensor_parallel

    # which warns that norms and checkpoints take a collective for each of two axes
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        tensor_parallel(model, mesh)
        for block in model.blocks:
            # gate and value are packed
            hidden = block.mlp.leave.in_features
            packed = Sections((hidden, hidden), (hidden, hidden))
            cut = Cut({"enter.weight": packed, "leave.weight": Shard(1)}, {"leave.in_features": hidden})
            parallelize_module(block.mlp, mesh, HeadwiseParallel(cut))
    except ValueError as error:
        raise UserError(f"--tp {mesh.size()}: {error}") from error
