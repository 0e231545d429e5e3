"""Chunkwise form in PyTorch: matrix products inside chunks, one state a chunk between them. Runs on any device.

Inside a chunk of C tokens, with decay a, P = causal(q k^T) * (decay from s to t) and S the state that enters:
o = P (beta v) + (q * decay to t) S, and S' = (decay of the chunk) S + (k * decay to the end)^T (beta v).
The delta rule replaces beta v by U - W S, the WY form: (I + L) [U | W] = beta [v | k * decay to t] with
L = strictly lower(beta (k k^T) * decay) (Yang et al. 2024, arXiv:2406.06484, with the decay of arXiv:2412.06464).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import compute_dtype, normalize

from . import decay, runner


class Chunked:
    """Every matrix recurrence, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if "delta" in problem.traits and "decay=vector" in problem.traits:
            return "the delta rule with a vector decay has no chunkwise form here"
        return None

    def plan(self, problem: Problem, device: Device) -> Plan:
        chunk = min(64, 1 << max(problem["T"] - 1, 0).bit_length())
        return Plan(self.name, (("chunk", chunk), ("segment", 16 * chunk)))

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return runner.forward(_step(plan["chunk"]), plan["segment"], call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        return runner.backward(_step(plan["chunk"]), plan["segment"], call, cu_seqlens, grad_o, grad_final)


def _step(chunk: int) -> runner.Step:
    return lambda call: _run(call, chunk)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, n, C, ...], the tail filled with zeros, which leave the state as it is."""
    pad = -x.shape[1] % chunk
    if pad:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def _run(call: MatrixCall, chunk: int) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(call.v.dtype)
    length, heads = call.v.shape[1:3]
    v = _chunks(call.v.to(dtype), chunk)
    q, k = (_chunks(x.to(dtype).repeat_interleave(heads // x.shape[2], 2), chunk) for x in (call.q, call.k))
    if call.norm_floor is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if call.g is None:
        g = v.new_zeros(1, 1, *v.shape[2:4])
    else:
        g = decay.clamp_log(_chunks(call.g.to(dtype), chunk))
    beta = None if call.beta is None else _chunks(call.beta.to(dtype), chunk)[..., None]
    state = call.initial_state.to(dtype)

    rows = g if g.dim() == 5 else g[..., None]  # [B, H, n, C, K or 1]
    q_in = q * decay.to_here(rows, -2)
    k_out = k * decay.to_end(rows, -2)
    total = rows.sum(-2)  # log decay of each chunk, [B, H, n, K or 1]
    if call.delta:
        within = decay.between(g)
        u, w = _wy(k, v, within, decay.to_here(rows, -2), beta)
        states = _delta_states(state, k_out.mT @ w, k_out.mT @ u, total)
        write = u - w @ states[:, :, :-1]
        p = (q @ k.mT) * within
    else:
        write = v if beta is None else beta * v
        states = _additive_states(state, k_out.mT @ write, total)
        p = decay.scores(q, k, g) if g.dim() == 5 else (q @ k.mT) * decay.between(g)
    o = call.scale * (p @ write + q_in @ states[:, :, :-1])
    o = o.movedim(1, 3).flatten(1, 2)[:, :length]
    if call.norm_floor is not None:
        o = normalize(o, call.norm_floor.to(dtype), call.eps)
    return o, states[:, :, -1]


def _additive_states(state: Tensor, writes: Tensor, total: Tensor) -> Tensor:
    """S_0 .. S_n [B, H, n + 1, K, V] of S_j = exp(total_j) S_{j-1} + writes_j, as one product over the chunks."""
    sums = torch.cat([state[:, :, None], writes], 2)
    logs = F.pad(total, (0, 0, 1, 0)).movedim(-1, 2)  # [B, H, K or 1, n + 1]
    if logs.shape[2] == 1:
        return (decay.between(logs[:, :, 0]) @ sums.flatten(3)).unflatten(3, sums.shape[3:])
    return (decay.between(logs) @ sums.movedim(3, 2)).movedim(2, 3)


def _wy(k: Tensor, v: Tensor, within: Tensor, from_start: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """U and W of the WY form, [B, H, n, C, V] and [B, H, n, C, K]."""
    lower = ((k @ k.mT) * within).tril(-1)
    right = torch.cat([v, k * from_start], -1)
    if beta is not None:
        lower, right = beta * lower, beta * right
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return solved.split([v.shape[-1], k.shape[-1]], -1)


def _delta_states(state: Tensor, erase: Tensor, write: Tensor, total: Tensor) -> Tensor:
    """S_0 .. S_n [B, H, n + 1, K, V] of S_j = (exp(total_j) - erase_j) S_{j-1} + write_j."""
    identity = torch.eye(erase.shape[-1], dtype=erase.dtype, device=erase.device)
    transition = total.exp()[..., None] * identity - erase
    states = [state]
    for step, addition in zip(transition.unbind(2), write.unbind(2), strict=True):
        states.append(addition + step @ states[-1])
    return torch.stack(states, 2)
