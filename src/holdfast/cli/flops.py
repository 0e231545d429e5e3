"""Model FLOPs: the operations that a training step cannot do without, whatever kernels it runs."""

import torch
from torch import nn

from holdfast.nn import KDA, MLSTM, RWKV7, DeltaNet, GatedDeltaNet, GatedDeltaProduct, Mamba2
from holdfast.nn.norm import GatedRMSNorm, HeadLayerNorm
from holdfast.planner.device import Device

from .attention import Attention
from .language_model import LanguageModel

# a multiply-add is two; a backward pass has a product for the inputs' gradients and one for the weights'
A_MULTIPLY_ADD = 2 * 3
# their weights are looked up, or multiply elementwise
NO_PRODUCTS = (nn.Embedding, GatedRMSNorm, HeadLayerNorm)


def flops_per_token(model: LanguageModel, length: int) -> int:
    """Of both passes, in sequences of that length: six for each weight that a token is multiplied with, and six for
    each multiply-add of a token with a state. What is elementwise, and what is computed twice, does not count."""
    multiply_adds = sum(_weights(module) for module in model.modules())
    if model.head is None:
        multiply_adds += model.embedding.weight.numel()
    return A_MULTIPLY_ADD * (multiply_adds + sum(_with_state(block.mixer, length) for block in model.blocks))


def _weights(module: nn.Module) -> int:
    """Of matrices, convolutions and recurrent connections, those of the parts of a module left out."""
    if isinstance(module, NO_PRODUCTS):
        return 0
    named = module.named_parameters(recurse=False)
    return sum(x.numel() for name, x in named if x.ndim > 1 and (name == "R" or name.startswith("weight")))


def _with_state(mixer: nn.Module, length: int) -> int:
    """Multiply-adds of a token with the state of a mixer, step by step: each element is written and read once, and by a
    delta rule read once more; mLSTM's normaliser is a column of it. Attention has two with each channel of each token
    up to this one, half of them all on average."""
    if isinstance(mixer, Attention):
        return mixer.out_proj.in_features * (length + 1)
    if isinstance(mixer, Mamba2):
        return 2 * mixer.num_heads * mixer.d_state * mixer.head_dim
    if not hasattr(mixer, "key_dim"):
        # a vector: where it is not elementwise, weights are what it is multiplied with
        return 0
    heads = getattr(mixer, "num_v_heads", mixer.num_heads)
    columns = mixer.value_dim + isinstance(mixer, MLSTM)
    if isinstance(mixer, GatedDeltaProduct):
        # each write reads the state before it, and the token once more
        return (2 * mixer.num_householder + 1) * heads * mixer.key_dim * columns
    if isinstance(mixer, RWKV7):
        # two writes, the first of what is read before
        return 4 * heads * mixer.key_dim * columns
    times = 3 if isinstance(mixer, DeltaNet | GatedDeltaNet | KDA) else 2
    return times * heads * mixer.key_dim * columns


def peak_rate(device: torch.device, dtype: str) -> float | None:
    """Operations a second of matrix products in that dtype, as the vendor states them; None where that is not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    known = Device.recognised(properties.name)
    # a part of a GPU, or another one with a similar name
    if known is None or known.sms != properties.multi_processor_count or "NVL" in properties.name:
        return None
    if dtype == "bfloat16":
        return known.tensor_rate
    # with TF32, tensor cores take float32 too, at a rate that is not noted
    return known.fp32_rate if torch.get_float32_matmul_precision() == "highest" else None
