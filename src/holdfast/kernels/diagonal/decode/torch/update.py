"""A few tokens on a pool of states in PyTorch: the step loop, token by token. It reads slots on the host."""

import torch
from torch import Tensor

from holdfast.kernels.slots import Slots
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import DiagonalCall
from holdfast.recurrences.oracle_diagonal import diagonal_steps


class PooledSteps:
    """Every diagonal recurrence, on every device."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def update(self, plan: Plan, call: DiagonalCall, states: Tensor, slots: Slots) -> Tensor:
        """Return h [B, L, D] in x's dtype; the pool's states [slots, D] go on."""
        length = call.x.shape[1]
        if not states.shape[0]:
            return torch.zeros_like(call.x, memory_format=torch.contiguous_format)
        state, there = slots.get(states), slots.are_read(states.shape[0])[:, None, None]
        slots.put(states, state, 0, length)
        outputs = []
        for token in range(length):
            inputs = [None if x is None else x[:, token : token + 1] for x in call[:3]]
            h, state = diagonal_steps(DiagonalCall(*inputs, state, call.log))
            state = state.to(states.dtype)
            outputs.append(torch.where(there, h, 0.0))
            slots.put(states, state, token + 1, length)
        return torch.cat(outputs, 1).to(call.x.dtype)
