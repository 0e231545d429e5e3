"""Vector decay on Hopper: forward in one launch; backward a sweep in reverse for dv, then all chunks at once.

A forward pass that a backward pass may follow leaves it the state before each chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import refusal
from holdfast.kernels.matrix.variants import SavedShape
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.scalar_decay.hopper import WIDEST, tile
from holdfast.planner.models.matrix.vector_decay import hopper as model
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {"delta": "the delta rule", "normalizer": "a normaliser"}
# tokens that the grid of backward_grads.py has room for
LONGEST = 65535 * model.CHUNK


class HopperGLA:
    """GLA, and SSD with a rate a key channel, in bfloat16 or float16 on NVIDIA's Hopper."""

    name = "hopper"
    uses_forward_output = True
    # g may have fewer heads than v, each for some of these; its gradient has v's
    groups_decays = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if "decay=vector" not in problem.traits:
            return "it takes one log decay a key channel"
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        for name in "KV":
            if problem[name] > WIDEST:
                return f"its registers hold a state of {WIDEST} x {WIDEST}; got {name} = {problem[name]}"
        if problem["T"] > LONGEST or problem["B"] > 65535:
            return f"a grid has axes of 65535 at most: it needs a T up to {LONGEST} and a B up to 65535"
        return without_gluon()

    def saved_shape(self, problem: Problem) -> SavedShape | None:
        """The state before each chunk; None of a state in slices."""
        if not problem.needs_grad or max(problem["K"], problem["V"]) > WIDEST:
            return None
        shape = tuple(problem[name] for name in "BTHV")
        sequences = problem["N"] if problem.varlen else None
        return SavedShape(kept_shape(shape, problem["K"], sequences), getattr(torch, problem.dtype))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        """o, the final state and, if the plan keeps them, the states before each chunk."""
        o, (final,), *kept = self.forward_rows(plan, [call], cu_seqlens)
        return o, final, *kept

    def forward_rows(self, plan: Plan, calls: Sequence[MatrixCall], cu_seqlens: Tensor | None) -> tuple[Any, ...]:
        """The same of a call in slices of K, a call each beside the same v: final states are a list.

        The plan keeps states of a whole call alone.
        """
        from holdfast.kernels import varlen
        from holdfast.kernels.matrix.args import sums_of
        from holdfast.kernels.runtime.tma import aligned

        from . import launch

        shape, dtype, device = calls[0].v.shape, calls[0].v.dtype, calls[0].v.device
        cu_seqlens = varlen.on_device(cu_seqlens, shape[1], device)
        o = torch.empty(shape, dtype=dtype, device=device)
        sums = [None] if len(calls) == 1 else sums_of(o, tile(shape[3]), len(calls), cu_seqlens)
        finals, kept = [], None
        for call, each in zip(calls, sums, strict=True):
            q, k, v, g, beta = launch.inputs(call)
            final = torch.empty(_state_shape(call, cu_seqlens), dtype=torch.float32, device=device)
            finals.append(final)
            if plan["keeps"]:
                sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
                kept = torch.empty(kept_shape(shape, k.shape[3], sequences), dtype=dtype, device=device)
            if v.numel() == 0:
                final.zero_() if call.initial_state is None else final.copy_(call.initial_state)
                continue
            start = aligned(call.initial_state)
            launch.run_sweep(q, k, g, v, o, start, final, kept, call.scale, beta, cu_seqlens, sums=each)
        return (o, finals) if kept is None else (o, finals, kept)

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        o: Tensor | None = None,
        states: Tensor | None = None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """states: what forward kept, which runs again without them. o is not read."""
        from holdfast.kernels import varlen
        from holdfast.kernels.lib.triton.group_sum import ungroup
        from holdfast.kernels.runtime.tma import aligned, tileable

        from . import launch

        q, k, v, g, beta = launch.inputs(call)
        cu_seqlens = varlen.on_device(cu_seqlens, v.shape[1], v.device)
        end = aligned(grad_final)
        grad_start = None
        if call.initial_state is not None:
            grad_start = torch.empty(_state_shape(call, cu_seqlens), dtype=torch.float32, device=v.device)
        if v.numel() == 0:
            if grad_start is not None:
                grad_start = grad_start.zero_() if end is None else grad_start.copy_(end)
            grads = [None if x is None else torch.zeros_like(x) for x in call[:6]]
            grads[3] = g.new_zeros(*v.shape[:3], g.shape[3])
            return grads, grad_start
        if states is None:
            _, _, states = self.forward(model.plan(keeps=True), call, cu_seqlens)
        u = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if grad_o is None else tileable(grad_o)
        heads = (*v.shape[:3], k.shape[3])
        dq, dk = (torch.empty(heads, dtype=v.dtype, device=v.device) for _ in range(2))
        dg = torch.empty(heads, dtype=torch.float32, device=v.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        dbeta = None
        if beta is not None:
            dbeta = torch.empty(-(-g.shape[3] // model.CHUNK), *beta.shape, dtype=torch.float32, device=v.device)
        # a chunk of a packed sequence is not where its gradients are
        ends = launch.ends(dq, dg, states) if cu_seqlens is None else torch.empty_like(states)
        launch.run_sweep(q, k, g, u, dv, end, grad_start, ends, call.scale, beta, cu_seqlens, reverse=True)
        launch.run_gradients(q, k, g, v, u, states, ends, dq, dk, dg, call.scale, beta, dbeta, cu_seqlens)
        assert call.g is not None
        if dbeta is not None:
            assert call.beta is not None
            dbeta = dbeta.sum(0).to(call.beta.dtype)
        return [*ungroup(dq, dk, q.shape[2]), dv, dg.to(call.g.dtype), dbeta, None], grad_start


def kept_shape(shape: Sequence[int], keys: int, sequences: int | None) -> tuple[int, int, int, int]:
    """Of a state of so many keys for each chunk of 64 tokens, as the kernels keep and read it.

    shape: v's. sequences: how many are packed, if they are.
    """
    batch, length, heads, values = shape
    # packed sequences have spare chunks between them
    chunks = -(-length // model.CHUNK) if sequences is None else length // model.CHUNK + sequences
    return batch, chunks * model.CHUNK, heads, tile(keys) * tile(values) // model.CHUNK


def _state_shape(call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    sequences = call.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3]
