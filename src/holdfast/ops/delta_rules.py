"""What the ops of delta rules share: checked arguments become a call, in float32 where keys repeat."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.recurrences.definition import Recurrence

from . import matrix


def repeats(k: Tensor) -> bool:
    """Whether k, [B, ..., Hq, K], is expanded along its tokens or along K: one number in memory for all of an axis."""
    sizes, strides = k.shape, k.stride()
    within = (*range(1, k.dim() - 2), k.dim() - 1)
    return any(strides[axis] == 0 and sizes[axis] > 1 for axis in within)


def run(
    recurrence: Recurrence,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    k: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a delta rule.

    Keys that repeat are computed in float32: all of them have one direction, so that each write of a chunk takes most
    of the one before it back, and roundings to 16 bits, which other keys spread over K directions, add up to several
    percent of an output.

    Args:
        given: what `prepare` returned. options: the rest of what the recurrence's `map` takes.
        k: the keys as the caller gave them.
        output_final_state, cu_seqlens, backend: as in `matrix.run`.

    Returns and raises as `matrix.run` does; o is in the dtype of the given v.
    """
    dtype = given["v"].dtype
    is_wide = dtype.itemsize == 2 and repeats(k)
    if is_wide:
        inputs = [name for name, x in given.items() if x is not None and recurrence.arguments[name].dtype == "input"]
        given = {**given, **{name: given[name].float() for name in inputs}}
    try:
        o, state = matrix.run(recurrence, recurrence.map(**given, **options), output_final_state, cu_seqlens, backend)
    except ValueError as error:
        if is_wide:
            error.add_note(f"k is expanded, strides {k.stride()}: such keys are computed in {torch.float32}")
        raise
    return o.to(dtype), state
