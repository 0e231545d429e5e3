"""mLSTM on Hopper: forward in one launch, which leaves n . q a token to the backward pass, and that in two.

The division by d = max(|norm|, exp(-m)) + eps makes two numbers a token of each gradient, 1 / d and that of norm;
with them the normaliser is one more column of the state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import refusal
from holdfast.kernels.matrix.variants import SavedShape
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.mlstm import hopper as model
from holdfast.planner.models.matrix.scalar_decay.hopper import WIDEST, tile
from holdfast.planner.models.matrix.wide import Cut, key_slices
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {"varlen": "packed sequences with a normaliser"}


class HopperMLSTM:
    """mLSTM in bfloat16, and in float16 without gradients, on NVIDIA's Hopper."""

    name = "hopper"
    uses_forward_output = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if not {"normalizer", "decay=scalar", "beta"} <= set(problem.traits):
            return "it takes a normaliser with a scalar decay and a write strength"
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        if problem.needs_grad and problem.dtype == "float16":
            return "float16 does not hold the numbers between its gradients' products; bfloat16 does"
        for name in "KV":
            if problem[name] > WIDEST:
                return f"its registers hold a state of {WIDEST} x {WIDEST}; got {name} = {problem[name]}"
        if problem.needs_grad and tile(problem["K"]) < tile(problem["V"]):
            return f"its gradients with a normaliser take a V no wider than K; got {problem['V']} and {problem['K']}"
        return without_gluon()

    def saved_shape(self, problem: Problem) -> SavedShape | None:
        """scale n . q, whole and of earlier chunks; these for each of K's slices."""
        if "normalizer" not in problem.traits:
            return None
        sizes = (1 + key_slices(problem["K"]), *(problem[name] for name in "BHT"))
        return SavedShape(sizes, torch.float32)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """o, the final state, and norm [2, B, H, T]: n . q, scaled, whole and of earlier chunks."""
        o, (final,), norm = self.forward_rows(plan, [call], cu_seqlens)
        return o, final, norm

    def forward_rows(
        self, plan: Plan, calls: Sequence[MatrixCall], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """o, the final state of each slice of K, and norm [1 + slices, B, H, T].

        calls: a slice each, beside the same v. norm: the whole, and of each slice what earlier chunks have of it.
        """
        from holdfast.kernels.matrix.args import Gates, sums_of
        from holdfast.kernels.runtime.tma import aligned, tileable

        from . import launch

        v = tileable(calls[0].v)
        batch, length, heads, values = v.shape
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        norm = torch.empty(1 + len(calls), batch, heads, length, dtype=torch.float32, device=v.device)
        sums, finals, before = [None], [], None
        if len(calls) > 1:
            sums = sums_of(o, tile(values), len(calls), None)
        for i, (call, each) in enumerate(zip(calls, sums, strict=True)):
            q, k = (tileable(x) for x in call[:2])
            start = call.initial_state
            final = torch.empty(batch, heads, k.shape[3], values + 1, dtype=torch.float32, device=v.device)
            finals.append(final)
            if v.numel() == 0:
                final.zero_() if start is None else final.copy_(start)
                continue
            so_far = norm[0] if i + 1 == len(calls) else torch.empty_like(norm[0])
            norms = so_far, norm[1 + i], before
            gates = Gates(call.g, call.beta, call.scale)
            ends = aligned(start), final
            launch.run_forward(q, k, v, o, gates, call.stabilizer, norms, *ends, call.eps, plan["stages"], each)
            before = so_far
        return o, finals, norm

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        o: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """norm: what forward returned, which runs again without it. o is read where the call is a slice of K."""
        from holdfast.kernels.lib.triton.group_sum import ungroup
        from holdfast.kernels.matrix.args import TOKENS, Gates
        from holdfast.kernels.matrix.mlstm.triton.inner_product import inner
        from holdfast.kernels.runtime.tma import aligned, tileable

        from . import launch

        q, k, v = (tileable(x) for x in call[:3])
        batch, length, heads, values = v.shape
        keys = k.shape[3]
        start, w = aligned(call.initial_state), aligned(grad_final)
        grad_state = None if start is None else torch.empty_like(start)
        if v.numel() == 0:
            if grad_state is not None:
                grad_state = grad_state.zero_() if w is None else grad_state.copy_(w)
            return [torch.zeros_like(x) for x in call[:6]], grad_state
        if norm is None:
            norm = self.forward(plan, call, cu_seqlens)[2]
        u = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if grad_o is None else tileable(grad_o)

        gates = Gates(call.g, call.beta, call.scale)
        save, chunks = plan["save"], -(-length // TOKENS)
        entries = -(-chunks // save)
        saved = torch.empty(batch, heads, entries, keys, values, dtype=v.dtype, device=v.device)
        saved_n = torch.empty(batch, heads, entries, keys, dtype=torch.float32, device=v.device)
        left = torch.empty(4, *norm.shape[1:], dtype=norm.dtype, device=norm.device)
        kept = launch.Kept(left, saved, saved_n, save, start is None)
        before = None if w is None else torch.empty_like(w)
        dq, dk = (torch.empty(batch, length, heads, keys, dtype=v.dtype, device=v.device) for _ in range(2))
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        products = inner(u, o) if Cut.of(plan).key_slices > 1 else None
        ends = start, before
        stages = plan["stages"]
        launch.run_queries(u, v, k, q, dq, gates, call.stabilizer, norm, *ends, kept, call.eps, stages, products)
        passing = None if w is None else (before * w).sum((2, 3))
        dg, dbeta = (torch.empty_like(left[0]).transpose(1, 2) for _ in range(2))
        launch.run_adjoint(q, k, u, v, dk, dv, dg, dbeta, gates, w, grad_state, passing, kept, plan["adjoint_stages"])
        dm = left[2].transpose(1, 2)
        return [*ungroup(dq, dk, q.shape[2]), dv, dg, dbeta, dm], grad_state
