"""Checks of what says which states of a pool a call reads and writes."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.slots import Slots


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


def check_pool(name: str, pool: Any, like: Tensor, shape: list[str | int], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises TypeError or ValueError unless pool is a tensor on the device of like, of one of the dtypes.

    shape: axes, by name where any size will do.
    """
    check_place(name, pool, like)
    sizes = list(pool.shape)
    if len(sizes) != len(shape) or any(isinstance(x, int) and x != n for x, n in zip(shape, sizes, strict=True)):
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}]; got {sizes}")
    if pool.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        expected = f"{', '.join(others)} or {last}" if others else f"{last} beside inputs of {like.dtype}"
        raise TypeError(f"{name}: expected {expected}; got {pool.dtype}")


def check_mlstm_pools(pool: Any, k: Tensor, v: Tensor, keys_last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """C, n and m of mlstm's tokens k [B, T, Hq, K] and v [B, T, H, V]. Raises TypeError or ValueError as check_pool."""
    if not isinstance(pool, tuple | list) or len(pool) != 3:
        raise TypeError(f"pool: expected the tensors (C, n, m) of mlstm; got {type(pool).__name__}")
    heads, keys = v.shape[2], k.shape[3]
    check_pool("pool[0]", pool[0], v, ["slots", *matrix_state(k, v, keys_last)], pool_dtypes(v))
    check_pool("pool[1]", pool[1], v, [pool[0].shape[0], heads, keys], pool_dtypes(v))
    # a unit's logarithm, of which 16 bits leave too little
    check_pool("pool[2]", pool[2], v, [pool[0].shape[0], heads], pool_dtypes(v)[:1])
    return tuple(pool)


def matrix_state(k: Tensor, v: Tensor, keys_last: bool) -> list[int]:
    """The shape of a state of k [B, T, Hq, K] and v [B, T, H, V]."""
    keys, heads, values = k.shape[3], *v.shape[2:]
    return [heads, values, keys] if keys_last else [heads, keys, values]


def check_dense(name: str, pool: Tensor) -> None:
    """Raises ValueError unless each state of the pool is dense."""
    if not pool.is_contiguous() and not pool[0].is_contiguous():
        raise ValueError(f"{name}: expected states that are dense; got strides {list(pool.stride())}")


def pool_dtypes(like: Tensor) -> tuple[torch.dtype, ...]:
    """What states in a pool may have beside inputs like that."""
    return (torch.float64,) if like.dtype == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)
