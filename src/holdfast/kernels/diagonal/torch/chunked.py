"""Vectorised PyTorch for the diagonal family, on any device: one scan forward, one scan backward in time for gradients.

From the output's gradient dy: dh_t = dy_t + conj(a_{t+1}) dh_{t+1}, dx_t = dh_t, da_t = dh_t conj(h_{t-1}).
Packed sequences share one scan: at the first step of each, the gate is 0 and a_t h_0 is added to x_t.
"""

import torch
from torch import Tensor

from holdfast.kernels.diagonal import complex_view as pairs
from holdfast.kernels.diagonal.boundary_states import BoundarySteps
from holdfast.kernels.lib.torch.linear_scan import chunk_size, scan
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import pytorch
from holdfast.recurrences.definition import DiagonalCall

# of a, x, theta and the initial state
Grads = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Chunked:
    """Every diagonal recurrence, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        plan = Plan(self.name, (("chunk", chunk_size(problem["T"])),))
        cost = pytorch.diagonal_chunked(problem, direction, plan["chunk"])
        return (pytorch.predicted(plan, cost, problem, device, direction),)

    def forward(
        self, plan: Plan, call: DiagonalCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return h [B, T, D] in x's dtype, and the final state [N, D]; entries are left as they are."""
        run = _Run(call, cu_seqlens, plan["chunk"])
        # real channels of equal-length sequences need no wide history: each state is rounded as it is written
        streams = call.theta is None and cu_seqlens is None
        states = torch.empty(call.x.shape, dtype=call.x.dtype if streams else run.dtype, device=call.x.device)
        final = run.forward(states)
        return states.to(call.x.dtype), final

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
        """Return the gradients of a, x, theta (None without theta) and the initial state; entries are not used.

        states: the forward's output where it is float32 or wider; None where it was rounded, to run forward again.
        """
        run = _Run(call, cu_seqlens, plan["chunk"])
        if states is None:
            states = torch.empty(call.x.shape, dtype=run.dtype, device=call.x.device)
            run.forward(states)
        return run.backward(states, grad_o, grad_final)


class _Run:
    """One call as a scan over numbers, complex ones where channels are pairs."""

    def __init__(self, call: DiagonalCall, cu_seqlens: Tensor | None, chunk: int) -> None:
        self.call, self.chunk = call, chunk
        self.dtype = torch.promote_types(call.x.dtype, torch.float32)
        self.length = call.x.shape[1]
        self.boundary = BoundarySteps.of(cu_seqlens, self.length, call.x.device)
        self.gate = call.a.to(self.dtype).exp() if call.log else call.a.to(self.dtype)
        if call.theta is not None:
            self.gate = self.gate * pairs.unit(call.theta.to(self.dtype))
        if call.initial_state is None:
            sequences = call.x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            self.initial = self.gate.new_zeros(sequences, self.gate.shape[2])
        else:
            self.initial = self._numbers(call.initial_state.to(self.dtype))
        if self.length:
            self.entry_gate = self.gate[self.boundary.starts]
        self.unbroken = self.gate
        if self.boundary.packed:
            self.gate = self.gate.clone()
            self.gate[self.boundary.starts] = 0

    def _numbers(self, x: Tensor) -> Tensor:
        return x if self.call.theta is None else pairs.join(x)

    def _channels(self, x: Tensor) -> Tensor:
        return x if self.call.theta is None else pairs.split(x)

    def forward(self, states: Tensor) -> Tensor:
        """Fill states [B, T, D] and return the final state [N, D], a tensor of its own."""
        boundary, final = self.boundary, self.initial.clone()
        if self.length:
            out = self._numbers(states)
            x = self.call.x if self.call.theta is None else pairs.join(self.call.x.to(self.dtype))
            entry = self.initial
            if boundary.packed:
                entry = torch.zeros_like(self.gate[:, 0])
                x = x.to(self.gate.dtype, copy=True)
                x[boundary.starts] += self.entry_gate * self.initial[boundary.members]
            last = scan(self.gate, x, entry, out, self.chunk)
            final[boundary.members] = out[boundary.stops] if boundary.packed else last
        return self._channels(final)

    def backward(self, states: Tensor, grad_o: Tensor | None, grad_final: Tensor | None) -> Grads:
        boundary, call = self.boundary, self.call
        if grad_o is None:
            grad = torch.zeros(call.x.shape, dtype=self.dtype, device=call.x.device)
        else:
            grad = grad_o.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        grad = self._numbers(grad)
        grad_initial = torch.zeros_like(self.initial)
        if grad_final is not None:
            grad_initial += self._numbers(grad_final.to(self.dtype))
        grad_gate = torch.empty_like(self.gate)
        if self.length:
            grad[boundary.stops] += grad_initial[boundary.members]
            # conj_physical, not conj: compiled graphs call ops below the dispatch key that resolves lazy conjugates
            earlier, later = grad[:, :-1], self.gate[:, 1:].conj_physical()
            # in place: the gradient of each output becomes that of its state
            scan(later, earlier, grad[:, -1], earlier, self.chunk, reverse=True)
            first = grad[boundary.starts]
            torch.mul(grad[:, 1:], self._numbers(states)[:, :-1].conj_physical(), out=grad_gate[:, 1:])
            grad_gate[boundary.starts] = first * self.initial[boundary.members].conj_physical()
            grad_initial[boundary.members] = first * self.entry_gate.conj_physical()
        grad_a, grad_theta = grad_gate, None
        if call.log:
            grad_a = grad_gate * self.unbroken
        if call.theta is not None:
            grad_a, grad_theta = pairs.gate_grads(grad_gate, call.a.to(self.dtype), call.theta.to(self.dtype))
            grad_theta = grad_theta.to(call.theta.dtype)
        dx = self._channels(grad).to(call.x.dtype)
        return grad_a.to(call.a.dtype), dx, grad_theta, self._channels(grad_initial)
