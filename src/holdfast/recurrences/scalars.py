"""Checks the numbers and switches that recurrences take beside tensors, by the names that users give them."""

import math
from typing import Any

import torch
from torch import Tensor


def number(name: str, x: Any, least: float | None = None) -> float:
    """x as a finite float: a number, or what Python's float takes that is neither text nor bool, as a tensor [].

    Raises TypeError for anything else, also for a tensor that requires a gradient, which it would not get; ValueError
    for a number that is not finite or below least.
    """
    if not isinstance(x, int | float) or isinstance(x, bool):
        x = _float(name, x)
    elif torch.compiler.is_compiling():
        # a graph for any number has none to look at
        return x
    if not math.isfinite(x) or (least is not None and x < least):
        raise ValueError(f"{name}: expected a finite number{'' if least is None else f' >= {least}'}; got {x}")
    return float(x)


def _float(name: str, x: Any) -> float:
    if isinstance(x, Tensor) and x.requires_grad:
        raise TypeError(f"{name}: expected a number, which no gradient goes through; got a tensor that requires one")
    if isinstance(x, bool) or not hasattr(x, "__float__"):
        raise TypeError(f"{name}: expected a number; got {type(x).__name__}")
    try:
        return float(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number; got {type(x).__name__}, of which float() says {error}") from error


def flag(name: str, x: Any) -> bool:
    """x. Raises TypeError unless it is a bool."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected a bool; got {type(x).__name__}")
    return x


def integer(name: str, x: Any) -> int:
    """x. Raises TypeError unless it is an integer."""
    if isinstance(x, bool | Tensor) or not (isinstance(x, int) or hasattr(x, "__index__")):
        raise TypeError(f"{name}: expected an integer; got {type(x).__name__}")
    return x
