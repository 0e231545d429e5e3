"""mamba_ssm's selective_state_update: one token of Mamba-1 or Mamba-2, its states updated in place."""

from typing import Any

import torch
from torch import Tensor

from holdfast import ops
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

from ..integers import check_integers
from ..pool_rows import PoolRows


def _arguments(sequences: str, channels: str, groups: tuple[str, ...]) -> dict[str, Argument]:
    return {
        "x": Argument("inputs", f"B {channels}"),
        "state": Argument("state before the token", f"{sequences} {channels} N", "float"),
        "dt": Argument("step sizes", f"B {channels}", "float"),
        "A": Argument("natural-log decay rate a unit of dt", f"{channels} N", "float"),
        "B": Argument("writes", groups),
        "C": Argument("reads", groups),
        "D": Argument("skip weight", channels, "float", required=False),
        "z": Argument("output gate, before its SiLU", f"B {channels}", required=False),
        "dt_bias": Argument("added to dt", channels, "float", required=False),
    }


# by whether there are heads, and whether states are rows of a pool
_ARGUMENTS = {
    (heads, pooled): _arguments(
        "rows" if pooled else "B", "H P" if heads else "D", ("B G N",) if heads else ("B G N", "B N")
    )
    for heads in (False, True)
    for pooled in (False, True)
}


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """`holdfast.step` of "mamba1", of channels or of heads of channels; no gradients.

    One launch on a contiguous float32 state without state_batch_indices. With heads whose decays are tied, as by
    expand, it is that of `pooled_step`, on states of 16 bits and with state_batch_indices too.

    Args:
        state: [batch, D, N], or with heads [batch, H, P, N], any floating dtype; updated in place.
        x: [batch, D], or [batch, H, P].
        dt, z: of x's shape, dt of any floating dtype.
        A: [D, N], or [H, P, N], any floating dtype.
        B, C: [batch, N], or [batch, G, N], of x's dtype.
        D, dt_bias: [D], or [H, P], any floating dtype.
        state_batch_indices: int32 or int64 [batch], each sequence's row of state [rows, ...], no row twice; negative
            for padding, whose outputs are 0.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message.
    """
    heads = isinstance(state, Tensor) and state.dim() == 4
    given = {"x": x, "state": state, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    checked = check_arguments(_ARGUMENTS[heads, state_batch_indices is not None], None, given)
    flag("dt_softplus", dt_softplus)
    pool = checked.pop("state")
    slots = None
    if state_batch_indices is not None:
        check_integers("state_batch_indices", state_batch_indices, x, B=x.shape[0])
    if heads and len(pool) and _is_tied(checked) and _is_dense(pool[0]) and _fits(pool, x):
        return _of_heads(checked | {"dt_softplus": dt_softplus}, pool, state_batch_indices).view(x.shape)
    if state_batch_indices is not None:
        slots = PoolRows(state_batch_indices)
        checked |= {name: slots.inputs(checked[name]) for name in ("x", "dt", "B", "C")}
        checked["z"] = None if z is None else slots.inputs(checked["z"])
    inputs = checked | {"dt_softplus": dt_softplus}
    now = (pool if slots is None else slots.read(pool)).to(torch.promote_types(checked["x"].dtype, torch.float32))
    now = now.contiguous()
    y = _of_channels(inputs, now.flatten(1, 2) if heads else now)
    y = y.view(checked["x"].shape)
    if slots is not None:
        slots.write(pool, now)
        return slots.outputs(y)
    if now is not pool:
        pool.copy_(now)
    return y


def _of_channels(inputs: dict[str, Any], state: Tensor) -> Tensor:
    """y [batch, 1, D], of heads too, whose channels are D in all; state [batch, D, N] is overwritten."""
    channels, states = state.shape[1:]
    shapes = {"x": (-1, 1, channels), "dt": (-1, 1, channels), "z": (-1, 1, channels)}
    shapes |= {"A": (channels, states), "D": (channels,), "dt_bias": (channels,)}
    flat = {name: None if inputs[name] is None else inputs[name].reshape(shape) for name, shape in shapes.items()}
    flat |= {"B": inputs["B"][:, None], "C": inputs["C"][:, None]}
    return ops.step("mamba1", flat | {"dt_softplus": inputs["dt_softplus"]}, state)


def _of_heads(inputs: dict[str, Any], pool: Tensor, rows: Tensor | None) -> Tensor:
    """y [batch, 1, H, P], where dt, A and dt_bias have one number a head; rows of pool [rows, H, P, N] are written."""
    named = {name: None if inputs[name] is None else inputs[name][:, None] for name in ("x", "B", "C", "z")}
    bias = None if inputs["dt_bias"] is None else inputs["dt_bias"][:, 0]
    named |= {"dt": inputs["dt"][:, None, :, 0], "A": inputs["A"][:, 0, 0], "D": inputs["D"], "dt_bias": bias}
    batch, device, keys_last = len(inputs["x"]), pool.device, pool[0].is_contiguous()
    slots = torch.arange(batch, dtype=torch.int32, device=device) if rows is None else rows.to(torch.int32)
    named["dt_softplus"] = inputs["dt_softplus"]
    return ops.pooled_step("ssd", named, pool if keys_last else pool.mT, slots, keys_last=keys_last)


def _is_dense(state: Tensor) -> bool:
    return state.is_contiguous() or state.mT.is_contiguous()


def _fits(pool: Tensor, x: Tensor) -> bool:
    """Whether `pooled_step` takes states of the pool's dtype beside x."""
    return (pool.dtype == torch.float64) == (x.dtype == torch.float64)


def _is_tied(inputs: dict[str, Any]) -> bool:
    """Whether the channels of a head share their dt, A and dt_bias, by strides of 0."""
    A, dt, bias = inputs["A"], inputs["dt"], inputs["dt_bias"]
    axes = [(A, 1), (A, 2), (dt, 2), *([] if bias is None else [(bias, 1)])]
    return all(x.shape[axis] == 1 or not x.stride(axis) for x, axis in axes)
