"""The layers of a language model over processes that share them: heads of mixers, channels of MLPs."""

import logging

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from holdfast.parallel import Cut, HeadwiseParallel, Sections, tensor_parallel

from .attention import Attention
from .errors import UserError
from .language_model import LanguageModel, SwiGLU


def share_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Changes the model; embedding, norms and head stay whole. Raises UserError for what does not divide."""
    # which warns that norms and checkpoints take a collective for each of two axes
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        if not all(isinstance(block.mixer, Attention) for block in model.blocks):
            tensor_parallel(model, mesh)
        for block in model.blocks:
            if isinstance(block.mixer, Attention):
                parallelize_module(block.mixer, mesh, HeadwiseParallel(_cut_of_attention(block.mixer)))
            parallelize_module(block.mlp, mesh, HeadwiseParallel(_cut_of_mlp(block.mlp)))
    except ValueError as error:
        raise UserError(f"--tp {mesh.size()}: {error}") from error


def _cut_of_attention(mixer: Attention) -> Cut:
    width, heads = mixer.out_proj.in_features, mixer.num_heads
    packed = Sections(3 * (width,), 3 * (heads,))
    return Cut({"qkv_proj.weight": packed, "out_proj.weight": Shard(1)}, {"num_heads": heads})


def _cut_of_mlp(mlp: SwiGLU) -> Cut:
    # gate and value are packed
    hidden = mlp.leave.in_features
    packed = Sections((hidden, hidden), (hidden, hidden))
    return Cut({"enter.weight": packed, "leave.weight": Shard(1)}, {"leave.in_features": hidden})
