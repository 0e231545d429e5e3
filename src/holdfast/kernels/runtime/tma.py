"""Tensors as TMA reads and writes them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def round_up_columns(columns: int) -> int:
    """The tile that holds so many columns."""
    return 64 if columns <= 64 else 128


def fits_tma(x: Tensor) -> bool:
    """Whether TMA can read and write x [B, T, H, D]: rows of 16 bytes, the last axis dense."""
    b, t, h, d = x.stride()
    return d == 1 and not (b | t | h) & 7 and b > 0 and t > 0 and h > 0 and x.data_ptr() % 16 == 0


def for_tma(x: Tensor) -> Tensor:
    """x [B, T, H, D] itself if TMA can read it, else a contiguous copy."""
    return x if fits_tma(x) else x.clone(memory_format=torch.contiguous_format)


def room_or_empty(room: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """room, if it is given with that shape and like's dtype and TMA can write it; else new memory."""
    if room is not None and room.shape == shape and room.dtype == like.dtype and fits_tma(room):
        return room
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def tiles(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """x in tiles, read as 0 and not written out of bounds. Rows must be of whole 16 bytes, the last axis dense."""
    # TensorDescriptor checks what it is given, at several microseconds each; callers here have done so
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, x.shape, x.stride()
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


def aligned(x: Tensor | None) -> Tensor | None:
    """x, dense and at a multiple of 16 bytes, as TMA and compiled kernels take it; a copy where it is not."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
