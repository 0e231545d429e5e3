"""The time loop in PyTorch: one matrix product and the cell's traced graph a step. Runs on any device.

Named loop, not chunked: a nonlinear recurrence has no chunkwise form.
Forward, for each step: the gates, which hold x + b, gain R h; the cell turns them into new states. Backward, for each
step from the last: the cell's vjp gives dg and the states' gradients; R^T dg joins that of h. dR = sum of dg h^T,
db = sum of dg and dx = dg are formed a block of steps at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.dense import gate_layout as layout
from holdfast.kernels.dense.gate_layout import Gates
from holdfast.kernels.dense.varlen_schedule import VarlenSchedule, make_schedule
from holdfast.kernels.runtime.replay.recording import note_values_read
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.cell import Cell
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.oracle_matrix import compute_dtype

from . import pointwise


class Loop:
    """Every cell, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "loop"
    compact = False
    # the module whose forward and backward run the cell
    cells = pointwise

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        # enough rows for an efficient product, few enough for their intermediates to stay in cache
        rows = max(256, 65536 // max(problem["H"] * problem["D"], 1))
        return (Candidate(Plan(self.name, (("rows", rows),))),)

    def forward(
        self, plan: Plan, call: DenseCall, cu_seqlens: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        time = make_schedule(*call.x.shape[:2], cu_seqlens, call.x.device)
        places, dtype = layout.arrange(call.cell), _dtype(call)
        run = self.cells.forward(call.cell, dtype, call.x.device)
        gates = _pre_activations(call, time, places)
        states, rows = _history(call.cell, time, gates, save)
        columns = [gates[:, :, places.column[gate]].split(time.sizes) for gate in call.cell.gates]
        recurrent = _recurrent(gates, places, time.sizes)
        weights = places.weights(call.R, dtype).mT
        resets = _resets(call, time)
        current = list(_initial_state(call, time))
        finished: list[list[Tensor]] = []
        for t, size in enumerate(time.sizes):
            if size < current[0].shape[0]:
                finished.append([x[size:] for x in current])
                current = [x[:size] for x in current]
            if resets is not None and resets[t] is not None:
                current = [x.masked_fill(resets[t], 0) for x in current]
            h = current[0]
            if h.shape[1] == 1:
                recurrent[t].addmm_(h[:, 0], weights[0])
            else:
                recurrent[t].baddbmm_(h.transpose(0, 1), weights)
            after = [row[t] for row in rows]
            run(*current, *[column[t] for column in columns], *after)
            current = after
        finished.append(current)
        final = torch.stack([torch.cat([part[s] for part in reversed(finished)]) for s in range(len(current))])
        h = call.x.new_empty(*call.x.shape[:2], *call.x.shape[3:])
        time.put(states[0], h, 0, len(time.sizes))
        if not save:
            states, gates = gates.new_empty(0), gates.new_empty(0)
        return h, time.leave(final), states, gates

    def backward(
        self,
        plan: Plan,
        call: DenseCall,
        cu_seqlens: Tensor | None,
        states: Tensor,
        gates: Tensor,
        grad_h: Tensor | None,
        grad_final: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        cell, dtype = call.cell, _dtype(call)
        time, places = make_schedule(*call.x.shape[:2], cu_seqlens, call.x.device), layout.arrange(cell)
        run = self.cells.backward(cell, dtype, call.x.device)
        weights = places.weights(call.R, dtype)
        initial = _initial_state(call, time)
        ending = torch.zeros_like(initial) if grad_final is None else time.enter(grad_final.to(dtype))
        grads_h = None if grad_h is None else time.steps(grad_h)
        resets = _resets(call, time)
        dx = call.R.new_empty(call.x.shape)
        dR = torch.zeros_like(weights)
        db = gates.new_zeros(gates.shape[1:])
        carry = [x[: time.sizes[-1] if time.sizes else 0] for x in ending]
        for start, stop in reversed(time.blocks(plan["rows"])):
            first, last, sizes = time.offsets[start], time.offsets[stop], time.sizes[start:stop]
            before = [_before(x, entry, time, start, stop) for x, entry in zip(states, initial, strict=True)]
            if call.reset is not None:
                mask = time.rows(call.reset, start, stop).flatten()[:, None, None]
                before = [x.masked_fill(mask, 0) for x in before]
            block = gates[first:last]
            ready = run.prepare(*before, *[block[:, :, places.column[gate]] for gate in cell.gates])
            ready = [x.split(sizes) for x in ready]
            dg = torch.empty_like(block)
            columns = [dg[:, :, places.column[gate]].split(sizes) for gate in cell.gates]
            recurrent = _recurrent(dg, places, sizes)
            for j in reversed(range(stop - start)):
                t = start + j
                here = carry[0].shape[0]
                if here < sizes[j]:
                    carry = [torch.cat([x, end[here : sizes[j]]]) for x, end in zip(carry, ending, strict=True)]
                if grads_h is not None:
                    carry[0] = carry[0] + grads_h[t]
                carry = list(run.carry(*carry, *[x[j] for x in ready], *[column[j] for column in columns]))
                if not call.cut_recurrent_grad:
                    carry[0] = _through_weights(carry[0], recurrent[j], weights, call.recurrent_grad_clip)
                if resets is not None and resets[t] is not None:
                    carry = [x.masked_fill(resets[t], 0) for x in carry]
            taken = dg[:, :, places.recurrent].flatten(2).transpose(0, 1)
            dR.baddbmm_(taken.mT, before[0].transpose(0, 1))
            if call.b is not None:
                db += dg.sum(0)
            for k, gate in enumerate(cell.input):
                time.put(dg[:, :, places.column[gate]], dx[:, :, k], start, stop)
        grad_initial = torch.stack([torch.cat([x, end[x.shape[0] :]]) for x, end in zip(carry, ending, strict=True)])
        if call.b is not None:
            db = torch.stack([db[:, places.column[gate]] for gate in cell.gates]).to(call.b.dtype)
        return (
            dx,
            places.weight_grad(dR).to(call.R.dtype),
            db if call.b is not None else None,
            time.leave(grad_initial),
        )


def _dtype(call: DenseCall) -> torch.dtype:
    return compute_dtype(call.R.dtype)


def _initial_state(call: DenseCall, time: VarlenSchedule) -> Tensor:
    """[S, N, H, D] in the loop's order of sequences."""
    if call.initial_state is not None:
        return time.enter(call.initial_state)
    sequences = call.x.shape[0] if time.sequences is None else len(time.sequences)
    return call.R.new_zeros(len(call.cell.states), sequences, *call.x.shape[3:], dtype=_dtype(call))


def _pre_activations(call: DenseCall, time: VarlenSchedule, places: Gates) -> Tensor:
    """x + b as [tokens, H, G, D]; R h is added where a step is reached."""
    cell, dtype = call.cell, _dtype(call)
    heads, width = call.x.shape[3:]
    rows = time.rows(call.x)
    gates = call.x.new_empty(*rows.shape[:2], heads, len(cell.gates), width, dtype=dtype)
    b = None if call.b is None else call.b.to(dtype)
    for k, gate in enumerate(cell.gates):
        target = gates[:, :, :, places.column[gate]]
        if gate not in cell.input:
            target.copy_(torch.zeros_like(target[:1, :1]) if b is None else b[k])
        elif b is None:
            target.copy_(rows[:, :, cell.input.index(gate)])
        else:
            torch.add(rows[:, :, cell.input.index(gate)], b[k], out=target)
    return gates.flatten(0, 1)


def _history(cell: Cell, time: VarlenSchedule, gates: Tensor, save: bool) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """Room for the states after each step, [S or 1, tokens, H, D], and for each state where each step writes it."""
    tokens, heads, _, width = gates.shape
    states = gates.new_empty(len(cell.states) if save else 1, tokens, heads, width)
    rows = [x.split(time.sizes) for x in states]
    if not save and time.sizes:
        # only h is kept; the others take turns in two places, since a step reads the old while it writes the new
        for pair in gates.new_empty(len(cell.states) - 1, 2, time.sizes[0], heads, width):
            rows.append([pair[t % 2, :size] for t, size in enumerate(time.sizes)])
    return states, rows


def _recurrent(gates: Tensor, places: Gates, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The gates that R feeds, of each step: [n, columns * D] with one head, [H, n, columns * D] with more."""
    taken = gates[:, :, places.recurrent].flatten(2)
    return taken[:, 0].split(sizes) if taken.shape[1] == 1 else taken.transpose(0, 1).split(sizes, 1)


def _resets(call: DenseCall, time: VarlenSchedule) -> list[Tensor | None] | None:
    """For each step a mask over its rows, None where nothing is reset."""
    if call.reset is None:
        return None
    if call.reset.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("reset: this backend reads it on the host, which a CUDA graph cannot capture")
    note_values_read()
    return [rows[:, None, None] if any(rows.tolist()) else None for rows in time.steps(call.reset)]


def _before(states: Tensor, initial: Tensor, time: VarlenSchedule, start: int, stop: int) -> Tensor:
    """One state before each step of a block, [rows, H, D]."""
    sizes, offsets = time.sizes, time.offsets
    if start > 0 and sizes[start - 1] == sizes[stop - 1]:
        return states[offsets[start - 1] : offsets[stop - 1]]
    parts = [initial[: sizes[0]]] if start == 0 else []
    parts += [states[offsets[t - 1] : offsets[t - 1] + sizes[t]] for t in range(max(start, 1), stop)]
    return torch.cat(parts)


def _through_weights(grad: Tensor, dg: Tensor, weights: Tensor, clip: float | None) -> Tensor:
    """grad + R^T dg, the second part clipped."""
    if clip is not None:
        product = (dg @ weights[0])[:, None] if dg.dim() == 2 else (dg @ weights).transpose(0, 1)
        return grad + product.clamp(-clip, clip)
    if dg.dim() == 2:
        return torch.addmm(grad[:, 0], dg, weights[0])[:, None]
    # a new tensor, because grad may be the caller's; in place, to keep rows contiguous
    total = grad.clone(memory_format=torch.contiguous_format)
    total.transpose(0, 1).baddbmm_(dg, weights)
    return total
