"""The diagonal scan as Triton kernels: one pass over a and x, the state in registers; see real.py.

Where channels are too few to fill a GPU, a sequence is cut into pieces: a launch that writes no states finds what each
piece does to a state (a product of gates and a state from zero), a scan over the pieces gives the state that enters
each, and the main launch runs all of them at once. It reads a and x twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.varlen import placed, sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.diagonal import triton as model
from holdfast.recurrences.definition import DiagonalCall

# Offsets inside a tile are 32-bit: a tile has 256 steps at most.
LONGEST_STEP = 2**23

# of a, x, theta and the initial state
Grads = tuple[Tensor, Tensor, Tensor | None, Tensor]


class TritonScan:
    """Every diagonal recurrence on NVIDIA GPUs from Ampere on, in float32 inside."""

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["D"] > model.MOST_CHANNELS:
            return f"it takes {model.MOST_CHANNELS} channels at most; got {problem['D']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: DiagonalCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return h [B, T, D] in x's dtype and the final state [N, D]; fill entries, where given, for backward."""
        with torch.cuda.device_of(call.x):
            run = self._run(plan, call, cu_seqlens)
            o = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            return o, run.forward(o, entries)

    def backward(
        self,
        plan: Plan,
        call: DiagonalCall,
        cu_seqlens: Tensor | None,
        states: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        entries: Tensor | None = None,
    ) -> Grads:
        """Return the gradients of a, x, theta (None without theta) and the initial state.

        states: the forward's output where it is float32; None where it was rounded: the states are then computed again
        from entries, as forward left them, or from the start where it left none.
        """
        with torch.cuda.device_of(call.x):
            return self._run(plan, call, cu_seqlens).backward(states, entries, grad_o, grad_final)

    def _run(self, plan: Plan, call: DiagonalCall, cu_seqlens: Tensor | None) -> "Run":
        return Run(plan, call, cu_seqlens, plan["piece"], plan["segments"] * plan["steps"])


@dataclass(frozen=True, slots=True)
class _Operands:
    """Tensors as the kernel reads them: channels, or words of one pair each. strides: of rows and steps."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]


class Run:
    """One call cut into pieces, which are sequences or parts of them.

    piece: steps of a piece, 0 for sequences. rows: steps between two states that forward saves for backward.
    """

    def __init__(self, plan: Plan, call: DiagonalCall, cu_seqlens: Tensor | None, piece: int, rows: int) -> None:
        self.plan, self.call, self.rows = plan, call, rows
        self.pairs = call.theta is not None
        batch, self.length, self.channels = call.x.shape
        self.bounds = None
        if cu_seqlens is not None:
            sequence_bounds(cu_seqlens, self.length)
            self.bounds = placed(cu_seqlens, call.x.device)
            self.piece, self.per_row, self.sequences = self.length, 1, cu_seqlens.shape[0] - 1
        else:
            self.piece = min(piece or self.length, self.length)
            self.per_row = -(-self.length // max(self.piece, 1))
            self.sequences = batch
        self.pieces = self.sequences * self.per_row

    def _state(self, *lead: int) -> Tensor:
        return torch.empty(*lead, self.channels, dtype=torch.float32, device=self.call.x.device)

    def _rows(self, x: Tensor) -> Tensor:
        return x if x.stride(-1) == 1 and x.stride(1) < LONGEST_STEP else x.clone(memory_format=torch.contiguous_format)

    def _words(self, x: Tensor) -> Tensor:
        """View x [B, T, D] as [B, T, D/2] words of two neighbours each, where channels are pairs."""
        x = self._rows(x)
        if not self.pairs:
            return x
        aligned = x.storage_offset() % 2 == 0 and all(n % 2 == 0 for n in x.stride()[:-1])
        if not aligned:
            x = x.clone(memory_format=torch.contiguous_format)
        return x.view(torch.int64 if x.element_size() == 4 else torch.int32)

    def _read(self, *given: Tensor) -> _Operands:
        """Return the gates, then the given ones of x's shape."""
        gates = (self.call.a,) if self.call.theta is None else (self.call.a, self.call.theta)
        # plans leave room for gates of four bytes; float32 is also what the arithmetic takes of wider ones
        gates = (x.float() if x.dtype == torch.float64 else x for x in gates)
        tensors = (*(self._rows(x) for x in gates), *(self._words(x) for x in given))
        return _Operands(tensors, tuple(n for x in tensors for n in x.stride()[:2]))

    def _launch(self, name: str, tensors: tuple[Any, ...], states: tuple[Any, ...], strides: tuple[int, ...]) -> None:
        from holdfast.kernels.runtime.launch import launch

        plan, numbers = self.plan, self.channels // 2 if self.pairs else self.channels
        if self.pairs:
            from . import complex as kernels

            found = {"forward": kernels.diagonal_complex_fwd, "backward": kernels.diagonal_complex_bwd}
            how = {"ELEMENT": kernels.ELEMENTS[self.call.x.dtype]}
        else:
            from . import real as kernels

            found = {"forward": kernels.diagonal_real_fwd, "backward": kernels.diagonal_real_bwd}
            how = {"LOG": self.call.log}
        grid = (-(-numbers // plan["block"]) * self.pieces,)
        sizes = (self.length, self.piece, self.per_row, numbers)
        how |= {key.upper(): plan[key] for key in ("block", "segments", "steps", "stages")}
        launch(found[name], grid, (*tensors, *states, self.bounds), (*sizes, *strides), how, plan["warps"])

    def _carry(self, product: Tensor, local: Tensor, start: Tensor | None) -> Tensor:
        """Return the state that enters each piece [B * per_row, D], from what pieces [B, per_row, D] do to one."""
        if self.pairs:
            numbers = torch.view_as_complex(product.unflatten(-1, (-1, 2)))
            gates = {"a": numbers.abs(), "theta": numbers.angle()}
        else:
            gates = {"a": product, "theta": None}
        call = DiagonalCall(**gates, x=local, initial_state=start)
        values = dict(self.plan.values) | {"piece": 0, "stages": 1}
        after, _ = TritonScan().forward(Plan(self.plan.backend, tuple(values.items())), call, None)
        first = torch.zeros_like(after[:, :1]) if start is None else start[:, None]
        return torch.cat([first, after[:, :-1]], 1)

    def forward(self, o: Tensor, entries: Tensor | None) -> Tensor:
        """Fill o and entries, and return the final state."""
        initial = None if self.call.initial_state is None else self.call.initial_state.contiguous()
        if not o.numel():
            shape = (self.sequences, self.channels)
            return o.new_zeros(shape, dtype=torch.float32) if initial is None else initial.clone()
        read = self._read(self.call.x)
        final = self._state(self.pieces)
        if self.per_row > 1:
            product = self._state(self.pieces)
            self._launch("forward", (*read.tensors, None), (None, final, product, None), read.strides)
            shape = (self.sequences, self.per_row, self.channels)
            initial = self._carry(product.view(shape), final.view(shape), initial)
        self._launch("forward", (*read.tensors, self._words(o)), (initial, final, None, entries), read.strides)
        if self.per_row > 1:
            final = final.view(self.sequences, self.per_row, -1)[:, -1].clone()
        return final

    def backward(
        self, states: Tensor | None, entries: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> Grads:
        call = self.call
        like = {"memory_format": torch.contiguous_format}
        gates = [None if x is None else torch.empty_like(x, **like) for x in (call.a, call.theta)]
        grad_x = torch.empty_like(call.x, **like)
        grad_final = None if grad_final is None else grad_final.float().contiguous()
        if not grad_x.numel():
            shape = (self.sequences, self.channels)
            if grad_final is None:
                grad_final = torch.zeros(shape, dtype=torch.float32, device=grad_x.device)
            found = grad_final.clone()
            return gates[0], grad_x, gates[1], found
        if grad_o is None:
            grad_o = call.x.new_zeros(self.channels).expand(call.x.shape)
        if states is not None:
            entries = None
        elif entries is None:
            entries = self._state(call.x.shape[0] * self.length // self.rows + self.sequences)
            self.forward(torch.empty_like(call.x, **like), entries)
        read = self._read(call.x if states is None else states, grad_o)
        initial = None if call.initial_state is None else call.initial_state.contiguous()
        grad_initial = self._state(self.pieces)
        nothing = (None,) * (3 if self.pairs else 2)
        if self.per_row > 1:
            product = self._state(self.pieces)
            edges = (None, None, grad_initial, product, None)
            self._launch("backward", (*read.tensors, *nothing), edges, read.strides)
            shape = (self.sequences, self.per_row, self.channels)
            grad_final = self._carry(product.view(shape).flip(1), grad_initial.view(shape).flip(1), grad_final).flip(1)
        results = (*(x for x in gates if x is not None), self._words(grad_x))
        edges = (initial, grad_final, grad_initial, None, entries)
        self._launch("backward", (*read.tensors, *results), edges, read.strides)
        if self.per_row > 1:
            grad_initial = grad_initial.view(self.sequences, self.per_row, -1)[:, 0].clone()
        return gates[0], grad_x, gates[1], grad_initial
