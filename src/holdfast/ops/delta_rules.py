"""What the ops of delta rules share: checked arguments become a call, in a wider dtype where keys repeat."""

import warnings
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

    Keys that repeat are computed in float32, those of float32 in float64: all of them have one direction, so that each
    write of a chunk takes most of the one before it back, and roundings, which other keys spread over K directions,
    add up to several percent of an output in 16 bits. No kernel takes float64, and on a GPU a warning says so.

    Args:
        given: what `prepare` returned. options: the rest of what the recurrence's `map` takes.
        k: the keys as the caller gave them.
        output_final_state, cu_seqlens, backend: as in `matrix.run`.

    Returns and raises as `matrix.run` does; o is in the dtype of the given v.
    """
    dtype = given["v"].dtype
    wide = torch.float32 if dtype.itemsize == 2 else torch.float64
    is_wide = dtype != wide and repeats(k)
    if is_wide:
        kinds = {name: recurrence.arguments[name].dtype for name, x in given.items() if x is not None}
        given = {**given, **{name: given[name].to(wide) for name, kind in kinds.items() if kind in ("input", "state")}}
        if wide == torch.float64 and k.device.type == "cuda" and not torch.compiler.is_compiling():
            warnings.warn(f"{recurrence.name}: {_why(k, wide)}, which has no kernel; k.contiguous() has", stacklevel=4)
    try:
        o, state = matrix.run(recurrence, recurrence.map(**given, **options), output_final_state, cu_seqlens, backend)
    except ValueError as error:
        if is_wide:
            error.add_note(_why(k, wide))
        raise
    states = torch.promote_types(dtype, torch.float32)
    return o.to(dtype), None if state is None else state.to(states)


def _why(k: Tensor, wide: torch.dtype) -> str:
    return f"k is expanded, strides {k.stride()}, and such keys are computed in {wide}"
