"""Chunkwise form in PyTorch: matrix products inside chunks, one state a chunk between them. Runs on any device.

Inside a chunk of C tokens, with decay a, P = causal(q k^T) * (decay from s to t) and S the state that enters:
o = P (beta v) + (q * decay to t) S, and S' = (decay of the chunk) S + (k * decay to the end)^T (beta v).
The delta rule replaces beta v by U - W S, the WY form: (I + L) [U | W] = beta [v | k * decay to t] with
L = strictly lower(beta (k k^T) * decay) (Yang et al. 2024, arXiv:2406.06484, with the decay of arXiv:2412.06464; a
vector decay weighs each channel of the product, arXiv:2510.26692). With an erase key e beside the write key,
(I + L) [U | W] = beta [v | e * decay to t] and L is of e k^T; where e reads the state before the step's decay, its
decays end a token earlier.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.lib.torch import chunks, decay
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import pytorch
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import compute_dtype, normalize

from . import segment_runner as runner


class Chunked:
    """Every matrix recurrence, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        chunk = min(64, 1 << max(problem["T"] - 1, 0).bit_length())
        plan = Plan(self.name, (("chunk", chunk), ("segment", 16 * chunk)))
        cost = pytorch.matrix_chunked(problem, direction, plan["segment"])
        return (pytorch.predicted(plan, cost, problem, device, direction),)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return runner.forward(_step(plan["chunk"]), plan["segment"], call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        return runner.backward(_step(plan["chunk"]), plan["segment"], call, cu_seqlens, grad_o, grad_final)


@dataclass(frozen=True)
class ChunkedCall:
    """A call cut into chunks, in the compute dtype: q, k, e [B, H, n, C, K], v [B, H, n, C, V (+ 1)].

    rows: log decay of each row of the state, [B, H, n, C, K or 1]. beta: [B, H, n, C, 1].
    """

    q: Tensor
    k: Tensor
    e: Tensor
    v: Tensor
    rows: Tensor
    beta: Tensor | None
    state: Tensor
    delta: bool
    erase_before_decay: bool

    @staticmethod
    def of(call: MatrixCall, chunk: int) -> "ChunkedCall":
        dtype, heads = compute_dtype(call.v.dtype), call.v.shape[2]

        q, k = (chunks.cut_heads(x.to(dtype), heads, chunk) for x in (call.q, call.k))
        e = k if call.e is None else chunks.cut_heads(call.e.to(dtype), heads, chunk)
        v = chunks.cut(call.v.to(dtype), chunk)
        if call.stabilizer is not None:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        if call.g is None:
            rows = v.new_zeros(1, 1, *v.shape[2:4], 1)
        else:
            g = decay.clamp_log(chunks.cut(call.g.to(dtype), chunk))
            rows = g if g.dim() == 5 else g[..., None]
        beta = None if call.beta is None else chunks.cut(call.beta.to(dtype), chunk)[..., None]
        return ChunkedCall(q, k, e, v, rows, beta, call.initial_state.to(dtype), call.delta, call.erase_before_decay)

    @cached_property
    def within(self) -> Tensor:
        """A scalar decay from each token to each later one, [B, H, n, C, C]."""
        return decay.between(self.rows[..., 0])

    def states(self) -> tuple[Tensor, Tensor]:
        """S_0 .. S_n [B, H, n + 1, K, V], and what each token writes beside its key [B, H, n, C, V]."""
        k_out = (self.k * decay.to_end(self.rows)).mT
        total = self.rows.sum(-2)
        if not self.delta:
            write = self.v if self.beta is None else self.beta * self.v
            return _additive_states(self.state, k_out @ write, total), write
        u, w = _wy(*self.erased(), self.v, self.beta)
        states = _delta_states(self.state, k_out @ w, k_out @ u, total)
        return states, u - w @ states[:, :, :-1]

    def erased(self) -> tuple[Tensor, Tensor]:
        """What each erase key finds of the chunk's keys, [B, H, n, C, C] below the diagonal, and e with the decay by
        which it reads the state that enters, [B, H, n, C, K]."""
        if not self.erase_before_decay:
            return self.pairs(self.e).tril(-1), self.e * decay.to_here(self.rows)
        # at the place of the token before, whose decays are those of a read before the step's own
        earlier = F.pad(self.e, (0, 0, -1, 1))
        return F.pad(self.pairs(earlier), (0, 0, 1, -1)), self.e * decay.to_before(self.rows)

    def pairs(self, x: Tensor) -> Tensor:
        """Causal x . k with the decay from key to x [B, H, n, C, K], [B, H, n, C, C]."""
        if self.rows.shape[-1] > 1:
            return decay.scores(x, self.k, self.rows)
        return (x @ self.k.mT) * self.within


def _step(chunk: int) -> runner.Step:
    return runner.Step(
        run=lambda call: _run(call, chunk), run_state=lambda call: ChunkedCall.of(call, chunk).states()[0][:, :, -1]
    )


def _run(call: MatrixCall, chunk: int) -> tuple[Tensor, Tensor]:
    cut = ChunkedCall.of(call, chunk)
    states, write = cut.states()
    inter = (cut.q * decay.to_here(cut.rows)) @ states[:, :, :-1]
    o = torch.baddbmm(inter.flatten(0, 2), cut.pairs(cut.q).flatten(0, 2), write.flatten(0, 2))
    o = chunks.join(call.scale * o.view_as(write), call.v.shape[1])
    if call.stabilizer is not None:
        o = normalize(o, call.stabilizer.to(o.dtype), call.eps)
    return o, states[:, :, -1]


def _additive_states(state: Tensor, writes: Tensor, total: Tensor) -> Tensor:
    """S_0 .. S_n [B, H, n + 1, K, V] of S_j = exp(total_j) S_{j-1} + writes_j, as one product over the chunks."""
    sums = torch.cat([state[:, :, None], writes], 2)
    logs = F.pad(total, (0, 0, 1, 0)).movedim(-1, 2)  # [B, H, K or 1, n + 1]
    if logs.shape[2] == 1:
        return (decay.between(logs[:, :, 0]) @ sums.flatten(3)).unflatten(3, sums.shape[3:])
    return (decay.between(logs) @ sums.movedim(3, 2)).movedim(2, 3)


def _wy(lower: Tensor, e_in: Tensor, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """U and W of the WY form, [B, H, n, C, V] and [B, H, n, C, K]. lower, e_in: as `erased` returns them."""
    right = torch.cat([v, e_in], -1)
    if beta is not None:
        lower, right = beta * lower, beta * right
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return solved.split([v.shape[-1], e_in.shape[-1]], -1)


def _delta_states(state: Tensor, erase: Tensor, write: Tensor, total: Tensor) -> Tensor:
    """S_0 .. S_n [B, H, n + 1, K, V] of S_j = (exp(total_j) - erase_j) S_{j-1} + write_j."""
    identity = torch.eye(erase.shape[-1], dtype=erase.dtype, device=erase.device)
    transition = total.exp()[..., None] * identity - erase
    states = [state]
    for step, addition in zip(transition.unbind(2), write.unbind(2), strict=True):
        states.append(addition + step @ states[-1])
    return torch.stack(states, 2)
