"""Checks what is given to a mixer: constructor sizes, the input and the state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.ops.check import FLOATS, check_cu_seqlens, check_is_local, is_dense

Spec = tuple[str, tuple[int, ...], torch.dtype]


def check_positive(name: str, value: int) -> int:
    """value. Raises ValueError unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a positive integer; got {value!r}")
    return value


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> int:
    """whole // part. Raises ValueError unless both are positive integers and part divides whole."""
    check_positive(whole_name, whole)
    check_positive(part_name, part)
    if whole % part:
        raise ValueError(f"{part_name}: expected a divisor of {whole_name} = {whole}; got {part}")
    return whole // part


def head_width(name: str, factor: float, whole_name: str, whole: int, heads: int) -> int:
    """Width of one of the heads that share factor * whole channels. Raises ValueError unless it is a whole number."""
    width = factor * whole
    if width != int(width) or width < 1 or int(width) % heads:
        expected = f"{name} * {whole_name} to be a positive multiple of {heads} heads"
        raise ValueError(f"{name}: expected {expected}; got {factor} * {whole} = {width:g}")
    return int(width) // heads


def check_input(x: Tensor, d_model: int, cu_seqlens: Tensor | None) -> int:
    """The number of sequences in x [B, T, d_model]: B, or those of cu_seqlens.

    Raises TypeError for x that is no floating-point tensor, ValueError for its shape; both for cu_seqlens.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor; got {type(x).__name__}")
    check_is_local("x", x)
    if x.dtype not in FLOATS:
        expected = "a dtype of 16 bits or more" if x.is_floating_point() else "a floating-point dtype"
        raise TypeError(f"x: expected {expected}; got {x.dtype}")
    if not is_dense(x):
        raise TypeError(f"x: expected a dense tensor; got {'a nested one' if x.is_nested else f'one of {x.layout}'}")
    if x.device.type == "meta":
        raise ValueError("x: expected a tensor with memory; got one on the meta device")
    if x.dim() != 3 or x.shape[2] != d_model:
        raise ValueError(f"x: expected shape [B, T, d_model={d_model}]; got {list(x.shape)}")
    if cu_seqlens is None:
        return x.shape[0]
    check_cu_seqlens(cu_seqlens, x.shape[0])
    return cu_seqlens.shape[0] - 1


def check_state(state: Any, expected: Sequence[Spec]) -> tuple[Tensor | None, ...]:
    """The tensors of a state; as many None where there is none.

    expected: name, shape and dtype of each. Raises TypeError for a state that is no tuple, for an element that is no
    tensor and for a dtype; ValueError for a number of tensors and for a shape.
    """
    if state is None:
        return (None,) * len(expected)
    names = "(" + ", ".join(name for name, _, _ in expected) + ")"
    if not isinstance(state, tuple | list):
        raise TypeError(f"state: expected a tuple {names}; got {type(state).__name__}")
    if len(state) != len(expected):
        raise ValueError(f"state: expected {len(expected)} tensors {names}; got {len(state)}")
    for n, (x, (name, shape, dtype)) in enumerate(zip(state, expected, strict=True)):
        if not isinstance(x, Tensor):
            raise TypeError(f"state[{n}]: expected {name} as a tensor; got {type(x).__name__}")
        check_is_local(f"state[{n}]", x)
        if x.shape != shape:
            raise ValueError(f"state[{n}]: expected {name} of shape {list(shape)}; got {list(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"state[{n}]: expected {name} in {dtype}; got {x.dtype}")
    return tuple(state)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and gates: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
