"""q, k and v by projections and short convolutions of their own, with the names that flash-linear-attention gives them.

A mixer with q_proj, k_proj, v_proj, q_conv1d, k_conv1d and v_conv1d is so handed to the functions here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .check import Spec, check_positive
from .projection import Projection
from .short_convolution import ShortConvolution


def add_qkv(mixer: nn.Module, d_model: int, widths: tuple[int, int, int], conv_width: int) -> None:
    """Gives the mixer the six modules. widths: channels of q, k and v. Raises ValueError for a conv_width below 1."""
    check_positive("conv_width", conv_width)
    for name, width in zip("qkv", widths, strict=True):
        setattr(mixer, f"{name}_proj", Projection(d_model, width))
    for name, width in zip("qkv", widths, strict=True):
        setattr(mixer, f"{name}_conv1d", ShortConvolution(width, conv_width))


def tails_of(mixer: nn.Module, sequences: int, dtype: torch.dtype) -> list[Spec]:
    """The convolutions' part of a state, for `check_state`: q_tail, k_tail and v_tail [N, width - 1, channels]."""
    convs = {name: getattr(mixer, f"{name}_conv1d") for name in "qkv"}
    return [(f"{name}_tail", (sequences, conv.width - 1, conv.channels), dtype) for name, conv in convs.items()]


def qkv_of(
    mixer: nn.Module, x: Tensor, tails: Sequence[Tensor | None], cu_seqlens: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v [B, T, channels] of x [B, T, d_model], and the tails to continue from."""
    found = [
        getattr(mixer, f"{name}_conv1d")(getattr(mixer, f"{name}_proj")(x), tail, cu_seqlens)
        for name, tail in zip("qkv", tails, strict=True)
    ]
    return [y for y, _ in found], [tail for _, tail in found]
