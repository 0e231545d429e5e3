"""A few tokens on a pool of states in PyTorch: the step loop, token by token. It reads slots on the host."""

import torch
from torch import Tensor

from holdfast.kernels.matrix.decode.call import NormalizedPool, NormalizedTokens, Pool
from holdfast.kernels.slots import Slots
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.mlstm import gates
from holdfast.recurrences.oracle_matrix import compute_dtype, matrix_steps


class PooledReference:
    """Every matrix recurrence, on every device."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

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

    def update_normalized(self, plan: Plan, call: NormalizedTokens, pool: NormalizedPool) -> Tensor:
        """Return h [B, L, H, V] in v's dtype; the pool's C, n and m go on."""
        slots, length = pool.slots, call.v.shape[1]
        states = (pool.C.mT if pool.keys_last else pool.C, pool.n, pool.m)
        if not pool.m.shape[0]:
            return torch.zeros_like(call.v, memory_format=torch.contiguous_format)
        state, there = [slots.get(x) for x in states], slots.are_read(pool.m.shape[0])[:, None, None, None]
        _put_all(slots, states, state, 0, length)
        outputs = []
        for token in range(length):
            o, state = _normalized_step(
                NormalizedTokens(*(x[:, token : token + 1] for x in call[:5]), *call[5:]), state
            )
            state = [x.to(of.dtype) for x, of in zip(state, states, strict=True)]
            outputs.append(torch.where(there, o, 0.0))
            _put_all(slots, states, state, token + 1, length)
        return torch.cat(outputs, 1).to(call.v.dtype)


def _put_all(slots: Slots, pools: tuple[Tensor, ...], states: list[Tensor], tokens: int, length: int) -> None:
    for pool, state in zip(pools, states, strict=True):
        slots.put(pool, state, tokens, length)


def _normalized_step(call: NormalizedTokens, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """h [B, 1, H, V] of one token and C, n and m after it, in float32 or wider."""
    wide = compute_dtype(call.v.dtype)
    C, n, m = (x.to(wide) for x in state)
    g, beta, here, last = gates(call.i, call.f, m, None, call.exponential, wide)
    held = torch.cat([C, n[..., None]], -1) if call.normalize else C
    unit = here if call.normalize else None
    tokens = MatrixCall(call.q, call.k, call.v, g, beta, unit, held, scale=call.scale, eps=call.eps)
    o, held = matrix_steps(tokens)
    return o, [held[..., :-1], held[..., -1], last] if call.normalize else [held, n, last]
