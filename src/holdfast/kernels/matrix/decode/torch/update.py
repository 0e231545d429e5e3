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
        count, tokens = pool.states.shape[0], call.v.shape[1]
        there = _in(pool.slots, count)
        states = pool.states.mT if pool.keys_last else pool.states
        if not count:
            return torch.zeros_like(call.v, memory_format=torch.contiguous_format)
        state = states[torch.where(there, pool.slots, 0)]
        last = torch.full_like(pool.slots, tokens) if pool.accepted is None else pool.accepted
        one_place = pool.next_slots.dim() == 1
        if one_place:
            _put(states, pool.next_slots, there & (last == 0), state)
        outputs = []
        for token in range(tokens):
            inputs = [None if x is None else x[:, token : token + 1] for x in call[:6]]
            e = None if call.e is None else call.e[:, token : token + 1]
            wide = state.to(compute_dtype(call.v.dtype))
            o, state = matrix_steps(MatrixCall(*inputs, wide, e, *call[8:]))
            state = state.to(states.dtype)
            outputs.append(torch.where(there[:, None, None, None], o, 0.0))
            if one_place:
                _put(states, pool.next_slots, there & (last == token + 1), state)
            else:
                _put(states, pool.next_slots[:, token], there, state)
        return torch.cat(outputs, 1).to(call.v.dtype)


def _in(slots: Tensor, count: int) -> Tensor:
    return (slots >= 0) & (slots < count)


def _put(states: Tensor, slots: Tensor, wanted: Tensor, state: Tensor) -> None:
    wanted = wanted & _in(slots, states.shape[0])
    states[slots[wanted]] = state[wanted]
