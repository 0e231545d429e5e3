"""mamba_ssm's mamba_chunk_scan_combined: Mamba-2's scan, of numbered sequences too."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast import ops
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

from .sequences import sequences_of

NO_LIMIT = (0.0, math.inf)

_ARGUMENTS = {
    "x": Argument("inputs", "B T H P"),
    "dt": Argument("step sizes", "B T H", "float"),
    "A": Argument("natural-log decay rate a unit of dt", "H", "float"),
    "B": Argument("writes", "B T G N"),
    "C": Argument("reads", "B T G N"),
    "D": Argument("skip weight", ("H", "H P"), "float", required=False),
    "z": Argument("output gate, before its SiLU", "B T H P", required=False),
    "dt_bias": Argument("added to dt", "H", "float", required=False),
    "initial_states": Argument("states before the first step", "B H P N", "float", required=False),
}


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`holdfast.ssd`, with states [batch, H, P, N].

    Args:
        x: [batch, T, H, P].
        dt: [batch, T, H], any floating dtype; dt_bias [H] is added first, softplus taken if dt_softplus, and what comes
            of it is held within dt_limit, at least 0 by default.
        A: [H], any floating dtype.
        B, C: [batch, T, G, N], of x's dtype.
        chunk_size, state_dtype: how mamba_ssm's kernels go about it; not used.
        D: [H] or [H, P], any floating dtype.
        z: [batch, T, H, P], of x's dtype.
        initial_states: any floating dtype. Beside seq_idx they are those of a row's sequence 0, if it begins with one.
        seq_idx: int32 or int64 [batch, T], the number of each token's sequence, rising along a row. Read on the host.
        cu_seqlens: int32 or int64 [sequences + 1], with a batch of one, the offsets of seq_idx's sequences, empty ones
            between them allowed; not without seq_idx.
        return_final_states: whether to return the states after each row's last token.
        return_varlen_states: whether to return those after each sequence of cu_seqlens, zeros for an empty one.

    Returns:
        y [batch, T, H, P] in x's dtype; where states are asked for, a tuple of y and, in this order, the final states
        [batch, H, P, N] and those of the sequences [sequences, H, P, N], float32 (float64 beside float64). Gradients go
        through all.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message, and for a
            combination that is not served.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    checked = check_arguments(_ARGUMENTS, None, given | {"initial_states": initial_states})
    x, initial_states = checked["x"], checked.pop("initial_states")
    for name, flagged in (("return_final_states", return_final_states), ("return_varlen_states", return_varlen_states)):
        flag(name, flagged)
    _check_unused(chunk_size, state_dtype)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("cu_seqlens: expected offsets beside return_varlen_states=True; got None")
    sequences = sequences_of(x, seq_idx, cu_seqlens)
    inputs = checked | _steps(checked["dt"], checked["dt_bias"], dt_softplus, dt_limit, x.dtype)
    if initial_states is not None:
        initial_states = initial_states.to(torch.promote_types(x.dtype, torch.float32)).mT
    is_asked = return_final_states or return_varlen_states
    if sequences is None:
        y, states = ops.ssd(**inputs, initial_state=initial_states, output_final_state=is_asked)
        return y if states is None else (y, states.mT)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name] = None if inputs[name] is None else inputs[name].flatten(0, 1)[None]
    if initial_states is not None:
        initial_states = sequences.spread(initial_states)
    y, states = ops.ssd(
        **inputs, initial_state=initial_states, output_final_state=is_asked, cu_seqlens=sequences.offsets
    )
    y = y.view(x.shape)
    if not is_asked:
        return y
    found = [states[sequences.last]] if return_final_states else []
    found += [sequences.of_offsets(states, cu_seqlens)] if return_varlen_states else []
    return y, *(each.mT for each in found)


def _steps(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], dtype: torch.dtype
) -> dict[str, Tensor | bool | None]:
    """dt, dt_bias and dt_softplus as Holdfast's op takes them."""
    flag("dt_softplus", dt_softplus)
    least, most = _limits(dt_limit)
    if dt_softplus and (least, most) == NO_LIMIT:
        return {"dt": dt, "dt_bias": dt_bias, "dt_softplus": True}
    dt = dt.to(torch.promote_types(dtype, torch.float32))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    return {"dt": dt.clamp(least, most), "dt_bias": None, "dt_softplus": False}


def _limits(dt_limit: tuple[float, float]) -> tuple[float, float]:
    is_pair = isinstance(dt_limit, tuple | list) and len(dt_limit) == 2
    if not is_pair or not all(isinstance(x, int | float) and not math.isnan(x) for x in dt_limit):
        raise TypeError(f"dt_limit: expected two numbers; got {dt_limit!r}")
    least, most = map(float, dt_limit)
    if least > most:
        raise ValueError(f"dt_limit: expected the lower number first; got {dt_limit!r}")
    return least, most


def _check_unused(chunk_size: int, state_dtype: torch.dtype | None) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size: expected a positive int; got {chunk_size!r}")
    if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
        raise TypeError(f"state_dtype: expected a dtype or None; got {type(state_dtype).__name__}")
