"""step: one token of a matrix recurrence, its state updated in place."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from holdfast.recurrences import RECURRENCES

from . import matrix
from .check import prepare


@torch.no_grad()
def step(op: str, arguments: Mapping[str, Any], state: Tensor, backend: str | None = None) -> Tensor:
    """One step of decoding: what `op` returns for one token, with the state's memory used again.

    A captured CUDA graph therefore decodes token after token on the same state. Gradients are not recorded.

    Args:
        op: a matrix recurrence whose state is one tensor: all but "mlstm".
        arguments: the op's arguments by name, tensors of one token (T = 1) and options such as scale; no initial_state.
        state: [B, H, K, V], float32 (float64 for float64 inputs), contiguous; overwritten by the state after the token.
        backend: as in every op.

    Returns:
        o [B, 1, H, V] in the inputs' dtype.

    Raises:
        ValueError, TypeError: for an unknown op or argument, for an argument of the wrong shape, dtype or device, named
            in the message; for a backend that is unknown or cannot serve the call.
    """
    known = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "matrix" and name != "mlstm"]
    if op not in known:
        raise ValueError(f"op: expected one of {', '.join(known)}; got {op!r}")
    recurrence = RECURRENCES[op]
    options = {name: x for name, x in arguments.items() if name not in recurrence.arguments}
    for name in options:
        if name not in signature(recurrence.map).parameters:
            raise TypeError(f"arguments: expected names that {op} takes; got {name!r}")
    if "initial_state" in arguments:
        raise TypeError("arguments: expected no initial_state, which is state; got one")
    tensors = {name: arguments.get(name) for name in recurrence.arguments if name != "initial_state"}
    given = prepare(recurrence, None, tensors | {"initial_state": state})
    call, finish = recurrence.map(**given, **options)
    if call.v.shape[1] != 1:
        raise ValueError(f"arguments: expected one token (T = 1); got T = {call.v.shape[1]}")
    if not state.is_contiguous():
        raise ValueError(f"state: expected a contiguous tensor; got strides {list(state.stride())}")
    o = matrix.matrix_step(*call[:6], state, *call[7:], recurrence.name, backend or "")
    return o if finish is None else finish(o, state)[0]
