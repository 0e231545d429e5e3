"""Checks of what says which states of a pool a call reads and writes."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.slots import Slots

from .check import FLOATS


def check_slots(slots: Any, next_slots: Any, accepted: Any, like: Tensor, tokens: int) -> Slots:
    """The slots, contiguous. next_slots: None for slots. like: [B, ...], on the call's device. tokens: of a sequence.

    Raises TypeError or ValueError for what is no int32 tensor [B] there, or for next_slots [B, tokens].
    """
    batch = like.shape[0]
    check_index("slots", slots, like, [batch])
    following = slots if next_slots is None else next_slots
    is_each = isinstance(following, Tensor) and following.dim() == 2
    check_index("next_slots", following, like, [batch, tokens] if is_each else [batch])
    if accepted is not None:
        check_index("accepted", accepted, like, [batch])
        if is_each:
            raise ValueError("accepted: expected None beside next_slots [B, L], which say where each state goes")
    return Slots(slots.contiguous(), following.contiguous(), None if accepted is None else accepted.contiguous())


def check_pool(pool: Any, like: Tensor, state: list[int]) -> None:
    """Raises TypeError or ValueError unless pool is [slots, *state], on the device of like, one of the call's inputs,
    and float64 where they are, else of another dtype that holds states."""
    check_place("pool", pool, like)
    if pool.dim() != 1 + len(state) or list(pool.shape[1:]) != state:
        raise ValueError(f"pool: expected shape [slots, {', '.join(map(str, state))}]; got {list(pool.shape)}")
    is_double = like.dtype == torch.float64
    if pool.dtype not in FLOATS or (pool.dtype == torch.float64) != is_double:
        expected = "torch.float64, as the inputs have" if is_double else "float32, bfloat16 or float16"
        raise TypeError(f"pool: expected {expected}; got {pool.dtype}")


def check_index(name: str, x: Any, like: Tensor, shape: list[int]) -> None:
    """Raises TypeError or ValueError unless x is an int32 tensor of the shape, on the device of like."""
    check_place(name, x, like)
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected torch.int32; got {x.dtype}")
    if list(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}; got {list(x.shape)}")


def check_place(name: str, x: Any, like: Tensor) -> None:
    """Raises TypeError or ValueError unless x is a tensor on the device of like."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor; got {type(x).__name__}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, as the inputs have; got {x.device}")
