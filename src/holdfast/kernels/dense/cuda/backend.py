"""The whole time loop in one launch, R on chip: CUDA C++ around the cell's printed functions."""

from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.dense.codegen import cpp
from holdfast.kernels.dense.saved import gates_dtype, shapes
from holdfast.kernels.dense.weight_grad.select import weight_grads
from holdfast.kernels.runtime import nvrtc
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.kernel_model import why_nothing_fits
from holdfast.planner.models.dense import cuda as model
from holdfast.recurrences.cell import Cell, lookup
from holdfast.recurrences.definition import DenseCall

from . import launch
from . import varlen as packed

# What the second axis of a grid holds.
MOST_HEADS = 65535


class Fused:
    """16-bit calls on NVIDIA GPUs from compute capability 8.0 on: tensor cores, float32 states and sums.

    h is rounded to the inputs' dtype where it meets R, and dg likewise; the cell itself sees float32. Machine code does
    not depend on batch size, length or number of heads. A plan with blocks = 1 holds a head in one block
    (one_block), another spreads it over blocks that exchange h every step (many_blocks).
    """

    name = "fused"
    compact = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if device.kind != "cuda" or device.capability is None or device.capability < (8, 0):
            return "needs an NVIDIA GPU of compute capability 8.0 or later"
        if problem.dtype not in ("bfloat16", "float16"):
            return f"needs bfloat16 or float16 inputs, for tensor cores; got {problem.dtype}"
        if problem.varlen and "initial_state" in problem.traits:
            return "takes packed sequences (cu_seqlens) only without initial_state"
        if 0 in (problem["B"], problem["T"], problem["H"], problem["D"]):
            return "an empty call has nothing to run"
        if problem["H"] > MOST_HEADS:
            return f"takes {MOST_HEADS} heads at most; got {problem['H']}"
        if reason := nvrtc.missing(device.capability):
            return reason
        if problem.needs_grad and find_spec("triton") is None:
            return "Triton is not installed, which forms dR"
        if reason := cpp.unprintable(cell_of(problem)):
            return reason
        for direction in ("forward", "backward") if problem.needs_grad else ("forward",):
            if not (found := self.candidates(problem, device, direction)):
                return (
                    f"R of one head ({problem['Gr']} x {problem['D']} x {problem['D']}) is too large for the chip "
                    f"at a batch of {problem['B']}, {direction} pass: {why_nothing_fits(found)}"
                )
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: DenseCall, cu_seqlens: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if cu_seqlens is None:
            return self._forward(plan, call, save)

        def run(call: DenseCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return self._forward(_best(call.cell, call.x, "forward"), call, save)

        every = packed.groups(cu_seqlens, call.x.shape[1], _most(call, "forward"), call.x.device)
        return packed.forward(every, call, len(cu_seqlens) - 1, save, run)

    def _forward(self, plan: Plan, call: DenseCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cell, x = call.cell, call.x
        batch, length, _, heads, width = x.shape
        padded = -(-width // 8) * 8
        states, gates = x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
        if save:
            state_shape, gate_shape = shapes(cell, batch, length, heads, width)
            states = x.new_empty(state_shape, dtype=torch.float32)
            gates = x.new_empty(gate_shape, dtype=gates_dtype(cell, x.dtype))
        h = x.new_empty(batch, length, heads, padded)
        final = x.new_empty(len(cell.states), batch, heads, padded, dtype=torch.float32)
        R, initial = _padded_weights(call.R, padded), _padded(call.initial_state, padded)
        arrays = [_padded(x, padded), R, _padded(call.b, padded), initial]
        if plan["blocks"] > 1:
            arrays.append(None if initial is None else initial[0].to(x.dtype))
            _mark(h[:, : launch.REACH])
        arrays += [_bits(call.reset), h, final, states if save else None, gates if save else None]
        size = {"B": batch, "T": length, "H": heads, "D": width, "W": padded}
        with torch.cuda.device(x.device):
            launch.run(plan, cell, "forward", arrays, None, call.reset is not None, size)
        if padded != width:
            h, final = h[..., :width].contiguous(), final[..., :width].contiguous()
        return h, final, states, gates

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
        if cu_seqlens is None:
            given = plan, call, h, states, gates, grad_h, grad_final
            dx, dR, db, grad_initial = self._backward(*given, call.R.dtype)
        else:

            def run(call: DenseCall, *rest: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
                return self._backward(_best(call.cell, call.x, "backward"), call, *rest, torch.float32)

            every = packed.groups(cu_seqlens, call.x.shape[1], _most(call, "backward"), call.R.device)
            dx, dR, db = packed.backward(every, call, h, states, gates, grad_h, grad_final, run)
            grad_initial = dR.new_zeros(len(call.cell.states), len(cu_seqlens) - 1, *call.x.shape[3:])
        return dx, dR.to(call.R.dtype), None if call.b is None else db.to(call.R.dtype), grad_initial

    def _backward(
        self,
        plan: Plan,
        call: DenseCall,
        h: Tensor,
        states: Tensor,
        gates: Tensor,
        grad_h: Tensor | None,
        grad_final: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dR and db in dtype."""
        cell = call.cell
        batch, length, inputs, heads, width = call.x.shape
        padded = -(-width // 8) * 8
        R, h, initial = _padded_weights(call.R, padded), _padded(h, padded), _padded(call.initial_state, padded)
        if plan["blocks"] > 1 and model.streams(plan, padded):
            R = R.mT.contiguous()
        only = [gate for gate in cell.recurrent if gate not in cell.input]
        dx = R.new_empty(batch, length, inputs, heads, padded)
        extra = R.new_empty(batch, length, len(only), heads, padded)
        if plan["blocks"] > 1:
            for each in (dx, extra) if only else (dx,):
                _mark(each[:, -launch.REACH :])
        # one sum for each range of sequences
        parts = launch.ceil(batch, plan["rows"])
        db = R.new_empty(parts, len(cell.gates), heads, padded, dtype=torch.float32)
        grad_initial = R.new_empty(len(cell.states), batch, heads, padded, dtype=torch.float32)
        arrays = [R, _bits(call.reset), initial, h, states, gates, _padded(grad_h, padded), _padded(grad_final, padded)]
        arrays += [dx, extra, db, grad_initial]
        clip = 0.0 if call.cut_recurrent_grad else call.recurrent_grad_clip
        size = {"B": batch, "T": length, "H": heads, "D": width, "W": padded}
        before = None if initial is None else initial[0]
        with torch.cuda.device(R.device):
            launch.run(plan, cell, "backward", arrays, clip, call.reset is not None, size)
            dR, db = weight_grads(cell, dx, extra, h, before, call.reset, db, dtype)
        if padded == width:
            return dx, dR, db, grad_initial
        return dx[..., :width], dR[..., :width, :width], db[..., :width], grad_initial[..., :width]


def cell_of(problem: Problem) -> Cell:
    """The cell of a call."""
    key = next(trait.removeprefix("cell=") for trait in problem.traits if trait.startswith("cell="))
    return lookup(key)


@lru_cache(maxsize=1024)
def _planned(
    cell: Cell, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, way: Direction
) -> list[Plan]:
    """The plans for a batch x of that shape, the best first."""
    batch, length, inputs, heads, width = shape
    sizes = {"B": batch, "T": length, "H": heads, "D": width, "S": len(cell.states), "G": len(cell.gates)}
    sizes |= {"Gi": inputs, "Gr": len(cell.recurrent)}
    problem = Problem.of(cell.name, "dense", dtype, sizes, {"needs_grad": True})
    return [candidate.plan for candidate in model.candidates(problem, describe(device), way)]


def _best(cell: Cell, x: Tensor, way: Direction) -> Plan:
    return _planned(cell, x.shape, x.dtype, x.device, way)[0]


def _most(call: DenseCall, way: Direction) -> int:
    """Sequences that a batch may have: a block carries the states of all that it takes in turn."""
    rest = call.x.shape[1:]
    sizes = (256, 128, 64, 32, 16, 8)
    return next(n for n in sizes if _planned(call.cell, (n, *rest), call.R.dtype, call.R.device, way))


def _padded(x: Tensor | None, width: int) -> Tensor | None:
    """Contiguous, the last axis filled up with zeros, where 16-byte copies can begin."""
    if x is None:
        return None
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _padded_weights(R: Tensor, width: int) -> Tensor:
    """Contiguous, where 16-byte loads can begin, both axes filled up with zeros."""
    short = width - R.shape[-1]
    return _padded(R if short == 0 else F.pad(R, (0, short, 0, short)), width)


def _bits(reset: Tensor | None) -> Tensor | None:
    """[B, T] bool -> [B, words] int32: bit t % 32 of word t / 32."""
    if reset is None:
        return None
    words = -(-reset.shape[1] // 32)
    bits = F.pad(reset.int(), (0, 32 * words - reset.shape[1])).unflatten(1, (words, 32))
    return (bits << torch.arange(32, device=reset.device, dtype=torch.int32)).sum(2, dtype=torch.int32)


def _mark(x: Tensor) -> None:
    """Fills a tensor with the pairs of NaNs that stand for "not there yet"."""
    x.view(torch.int16).fill_(-1)
