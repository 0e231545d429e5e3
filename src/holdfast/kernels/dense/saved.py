"""What the forward pass saves for the backward pass in 16-bit calls on a GPU, where memory decides the speed.

h is the output itself. states: the others, float32 [S - 1, B * T, H, W]. gates: pre-activations [B * T, H, W, slots],
in the cell's order and padded to a power of two, so that a lane takes a channel's in one access; in the inputs' dtype,
or in float32 if the cell's backward compares values, since a rounded one may fall on the other side. W is D rounded up
to 8. Tokens are in the caller's order. Every backend reads and writes this form, so that the two passes may run on
different ones.
"""

import torch
from torch import Tensor

from holdfast.kernels.dense.cuda.assemble import saved_gate_slots
from holdfast.recurrences.cell import Cell
from holdfast.recurrences.definition import DenseCall

from . import gate_layout as layout
from .codegen import cpp
from .varlen_schedule import make_schedule

HALF = (torch.bfloat16, torch.float16)


def compact(x: Tensor) -> bool:
    """Return whether calls on x save this form; otherwise they save what the loop does, in float32 or wider."""
    return x.device.type == "cuda" and x.dtype in HALF


def shapes(cell: Cell, batch: int, length: int, heads: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of saved states and gates."""
    padded = -(-width // 8) * 8
    tokens = batch * length
    return (len(cell.states) - 1, tokens, heads, padded), (tokens, heads, padded, saved_gate_slots(len(cell.gates)))


def gates_dtype(cell: Cell, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of saved gates, for inputs of a 16-bit dtype."""
    return torch.float32 if cpp.compares(cell) else dtype


def pack(call: DenseCall, cu_seqlens: Tensor | None, states: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Convert from the loop's own states [S, rows, H, D] and gates [rows, H, G, D]."""
    batch, length, _, heads, width = call.x.shape
    time, column = make_schedule(batch, length, cu_seqlens, call.x.device), layout.arrange(call.cell).column
    state_shape, gate_shape = shapes(call.cell, batch, length, heads, width)
    saved_states = states.new_zeros(state_shape)
    saved_gates = call.x.new_zeros(gate_shape, dtype=gates_dtype(call.cell, call.x.dtype))
    steps = len(time.sizes)
    for k in range(1, len(call.cell.states)):
        time.put(states[k], saved_states[k - 1].unflatten(0, (batch, length))[..., :width], 0, steps)
    for k, gate in enumerate(call.cell.gates):
        target = saved_gates.unflatten(0, (batch, length))[:, :, :, :width, k]
        time.put(gates[:, :, column[gate]].to(target.dtype), target, 0, steps)
    return saved_states, saved_gates


def unpack(
    call: DenseCall, cu_seqlens: Tensor | None, h: Tensor, states: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Convert to the loop's own states and gates, float32. call.x lends only its shape."""
    batch, length, _, heads, width = call.x.shape
    time, column = make_schedule(batch, length, cu_seqlens, call.x.device), layout.arrange(call.cell).column
    others = states.unflatten(1, (batch, length))[..., :width]
    rows = [time.rows(x).reshape(batch * length, heads, width).float() for x in (h, *others)]
    every = gates.unflatten(0, (batch, length))[..., :width, :]
    names = sorted(column, key=column.__getitem__)
    places = [call.cell.gates.index(gate) for gate in names]
    columns = [time.rows(every[..., k]).reshape(batch * length, heads, width) for k in places]
    return torch.stack(rows), torch.stack(columns, 2).float()
