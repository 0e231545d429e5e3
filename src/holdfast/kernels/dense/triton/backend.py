"""Small heads in portable Triton: the whole time loop of a few sequences of a head in one program."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.dense.codegen import cpp, triton_cell
from holdfast.kernels.dense.cuda.assemble import saved_gate_slots
from holdfast.kernels.dense.cuda.backend import MOST_HEADS, cell_of
from holdfast.kernels.dense.cuda.launch import ceil
from holdfast.kernels.dense.saved import gates_dtype, shapes
from holdfast.kernels.dense.weight_grad.select import weight_grads
from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.kernel_model import why_nothing_fits
from holdfast.planner.models.dense import triton as model
from holdfast.recurrences.cell import Cell
from holdfast.recurrences.definition import DenseCall


class TritonLoop:
    """16-bit calls with heads of up to 128 channels, in float32 inside; h and dg are rounded where they meet R."""

    name = "triton"
    compact = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem.dtype not in ("bfloat16", "float16"):
            return f"needs bfloat16 or float16 inputs, for tensor cores; got {problem.dtype}"
        if problem.varlen:
            return "takes no packed sequences (cu_seqlens)"
        if 0 in (problem["B"], problem["T"], problem["H"], problem["D"]):
            return "an empty call has nothing to run"
        if problem["D"] > model.MOST:
            return f"takes heads of up to {model.MOST} channels; got {problem['D']}"
        if problem["H"] > MOST_HEADS:
            return f"takes {MOST_HEADS} heads at most; got {problem['H']}"
        if reason := triton_cell.unprintable(cell_of(problem)):
            return reason
        passes: tuple[Direction, ...] = ("forward", "backward") if problem.needs_grad else ("forward",)
        for direction in passes:
            if not (found := self.candidates(problem, device, direction)):
                size = f"{problem['Gr']} x {problem['D']} x {problem['D']}"
                return f"R of one head ({size}) is too large for a block's {direction} pass: {why_nothing_fits(found)}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: DenseCall, cu_seqlens: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # triton comes only with torch's CUDA builds
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .time_loop import dense_time_loop_forward

        cell, x = call.cell, call.x.contiguous()
        batch, length, _, heads, width = x.shape
        h = x.new_empty(batch, length, heads, width)
        final = x.new_empty(len(cell.states), batch, heads, width, dtype=torch.float32)
        states = gates = None
        if save:
            state_shape, gate_shape = shapes(cell, batch, length, heads, width)
            states = x.new_empty(state_shape, dtype=torch.float32)
            gates = x.new_empty(gate_shape, dtype=gates_dtype(cell, x.dtype))
        given = (x, *map(_contiguous, (call.R, call.b, call.initial_state)), _bytes(call.reset))
        constants = {"CELL": triton_cell.functions(cell).forward, **_counts(cell)}
        constants |= {name: value for name, value in _places(cell).items() if name in ("INPUT_OF", "RECURRENT_OF")}
        with on_device_of(x):
            grid = (ceil(batch, model.ROWS), heads)
            tensors = (*given, h, final, states, gates)
            launch(
                dense_time_loop_forward,
                grid,
                tensors,
                (batch, length, heads),
                constants | _block(plan, cell, width),
                plan["warps"],
            )
        none = x.new_empty(0, dtype=torch.float32)
        return h, final, none if states is None else states, none if gates is None else gates

    def backward(
        self,
        plan: Plan,
        call: DenseCall,
        cu_seqlens: Tensor | None,
        h: Tensor,
        states: Tensor,
        gates: Tensor,
        grad_h: Tensor | None,
        grad_final: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .time_loop import dense_time_loop_backward

        cell, R = call.cell, call.R.contiguous()
        batch, length, inputs, heads, width = call.x.shape
        places = _places(cell)
        extras = sum(place >= 0 for place in places["EXTRA_OF"])
        dx = R.new_empty(batch, length, inputs, heads, width)
        extra = R.new_empty(batch, length, extras, heads, width)
        grid = (ceil(batch, model.ROWS), heads)
        db = R.new_empty(grid[0], len(cell.gates), heads, width, dtype=torch.float32)
        grad_initial = R.new_empty(len(cell.states), batch, heads, width, dtype=torch.float32)
        h, initial = h.contiguous(), _contiguous(call.initial_state)
        given = (R, initial, _bytes(call.reset), h, states, gates, _contiguous(grad_h), _contiguous(grad_final))
        clip = 0.0 if call.cut_recurrent_grad else call.recurrent_grad_clip
        numbers = (batch, length, heads, float("inf") if clip is None else clip)
        constants = {"CELL": triton_cell.functions(cell).backward, **_counts(cell), "EXTRAS": extras, **places}
        with on_device_of(R):
            tensors = (*given, dx, extra, db, grad_initial)
            launch(
                dense_time_loop_backward, grid, tensors, numbers, constants | _block(plan, cell, width), plan["warps"]
            )
            before = None if initial is None else initial[0]
            dR, db = weight_grads(cell, dx, extra, h, before, call.reset, db, R.dtype)
            return dx, dR, None if call.b is None else db, grad_initial


def _counts(cell: Cell) -> dict[str, int]:
    counts = {"STATES": len(cell.states), "GATES": len(cell.gates)}
    return counts | {"INPUTS": len(cell.input), "RECURRENTS": len(cell.recurrent)}


def _places(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Return each gate's place in x, in R and among those that R alone feeds, or -1; and which states are needed."""
    only = [gate for gate in cell.recurrent if gate not in cell.input]

    def places(among: Any) -> tuple[int, ...]:
        return tuple(list(among).index(gate) if gate in among else -1 for gate in cell.gates)

    found = {"INPUT_OF": places(cell.input), "RECURRENT_OF": places(cell.recurrent), "EXTRA_OF": places(only)}
    return found | {"NEEDS": tuple(map(int, cpp.old_states(cell)))}


def _block(plan: Plan, cell: Cell, width: int) -> dict[str, int]:
    padded = 8 * ceil(width, 8)
    return {
        "SAVED": saved_gate_slots(len(cell.gates)),
        "WIDTH": width,
        "PADDED": padded,
        "ROWS": model.ROWS,
        "BLOCK": plan["block"],
    }


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _bytes(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset.contiguous().view(torch.uint8)
