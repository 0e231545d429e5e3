"""The plain step loop: slow, right, and able to run every call on every device."""

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.autograd.vjp import vjp
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.oracle_dense import dense_steps


class Reference:
    """Runs the family's oracle, packed sequences one by one. Its backward runs it again and keeps all intermediates."""

    name = "reference"
    compact = False

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def forward(
        self, plan: Plan, call: DenseCall, cu_seqlens: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, final = _run(call, cu_seqlens)
        states, gates = h.new_empty(0), h.new_empty(0)
        if save:
            batch, length, inputs, heads, width = call.x.shape
            cell = call.cell
            states = h.new_zeros(len(cell.states), batch * length, heads, width)
            # the backward pass needs x, which fits where the gates would be
            gates = h.new_zeros(batch * length, heads, len(cell.gates), width)
            gates[:, :, :inputs] = call.x.flatten(0, 1).transpose(1, 2)
        return h.to(call.x.dtype, copy=True), final.clone(), states, gates

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
        batch, length, inputs = call.x.shape[:3]
        x = gates[:, :, :inputs].transpose(1, 2).unflatten(0, (batch, length))
        initial = call.initial_state
        if initial is None:
            sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
            initial = x.new_zeros(len(call.cell.states), sequences, *x.shape[3:])
        given = (x, call.R, initial) if call.b is None else (x, call.R, initial, call.b)

        def run(x: Tensor, R: Tensor, initial: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return _run(call._replace(x=x, R=R, b=b, initial_state=initial), cu_seqlens)

        dx, dR, grad_initial, *db = vjp(run, given, [grad_h, grad_final])
        # a copy: with one step, the gradients of x and of the initial state may be one tensor
        return dx.to(call.R.dtype), dR, db[0] if db else None, grad_initial.clone()


def _run(call: DenseCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        return dense_steps(call)
    bounds = varlen.sequence_bounds(cu_seqlens, call.x.shape[1])
    outputs, finals = [], []
    for n in range(len(bounds) - 1):
        steps = slice(bounds[n], bounds[n + 1])
        part = call._replace(
            x=call.x[:, steps],
            initial_state=None if call.initial_state is None else call.initial_state[:, n : n + 1],
            reset=None if call.reset is None else call.reset[:, steps],
        )
        h, final = dense_steps(part)
        outputs.append(h)
        finals.append(final)
    return torch.cat(outputs, 1), torch.cat(finals, 1)
