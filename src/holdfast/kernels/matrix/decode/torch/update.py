"""A few tokens on a pool of states in PyTorch: the step loop, token by token. It reads slots on the host."""

import torch
from torch import Tensor

from holdfast.kernels.matrix.decode.call import Pool
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import compute_dtype, matrix_steps


class PooledReference:
    """Every matrix recurrence without a normaliser, on every device."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return "a pool's states have no normaliser" if "normalizer" in problem.traits else None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def update(self, plan: Plan, call: MatrixCall, pool: Pool) -> Tensor:
        """Return o [B, L, H, V] in v's dtype; the pool's states go on."""
        slots, length = pool.slots, call.v.shape[1]
        states = pool.states.mT if pool.keys_last else pool.states
        if not states.shape[0]:
            return torch.zeros_like(call.v, memory_format=torch.contiguous_format)
        state, there = slots.get(states), slots.are_read(states.shape[0])[:, None, None, None]
        slots.put(states, state, 0, length)
        outputs = []
        for token in range(length):
            inputs = [None if x is None else x[:, token : token + 1] for x in call[:6]]
            e = None if call.e is None else call.e[:, token : token + 1]
            wide = state.to(compute_dtype(call.v.dtype))
            o, state = matrix_steps(MatrixCall(*inputs, wide, e, *call[8:]))
            state = state.to(states.dtype)
            outputs.append(torch.where(there, o, 0.0))
            slots.put(states, state, token + 1, length)
        return torch.cat(outputs, 1).to(call.v.dtype)
