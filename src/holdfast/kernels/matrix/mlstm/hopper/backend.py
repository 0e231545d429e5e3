"""mLSTM on Hopper: forward in one launch, which leaves each token's n . q to the backward pass, and that in two.

Through the division by d = max(|norm|, exp(-m)) + eps each gradient takes two numbers a token, 1 / d and the gradient
of norm; with them the normaliser is one more column of the state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import AnothersKernel, refusal
from holdfast.kernels.matrix.small_heads import REFUSAL, is_small
from holdfast.kernels.matrix.variants import GradRoom, SavedShape
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.mlstm import hopper as model
from holdfast.planner.models.matrix.tiles import WIDEST, tile
from holdfast.planner.models.matrix.wide import Cut, key_slices
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {"varlen": "packed sequences with a normaliser"}


class HopperMLSTM:
    """mLSTM in bfloat16, and in float16 without gradients, on NVIDIA's Hopper."""

    name = "hopper"
    takes_room = True
    uses_forward_output = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if not {"normalizer", "decay=scalar", "beta"} <= set(problem.traits):
            return AnothersKernel("it takes a normaliser with a scalar decay and a write strength")
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        if is_small(problem):
            return REFUSAL
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
        """Return o, the final state, and norm [2, B, H, T]: n . q, scaled, whole and its part of earlier chunks."""
        o, (final,), norm = self.forward_rows(plan, [call], cu_seqlens)
        return o, final, norm

    def forward_rows(
        self, plan: Plan, calls: Sequence[MatrixCall], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return o, the final state of each slice of K, and norm [1 + slices, B, H, T].

        calls: one for each slice, with the same v. norm: the whole, then each slice's part of earlier chunks.
        """
        from holdfast.kernels.matrix.args import DecayAndBeta, slice_sums
        from holdfast.kernels.runtime.tma import aligned, for_tma

        from . import launch

        v = for_tma(calls[0].v)
        batch, length, heads, values = v.shape
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        norm = torch.empty(1 + len(calls), batch, heads, length, dtype=torch.float32, device=v.device)
        sums, finals, slices_norm = [None], [], None
        if len(calls) > 1:
            sums = slice_sums(o, tile(values), len(calls), None)
        for i, (call, each) in enumerate(zip(calls, sums, strict=True)):
            q, k = (for_tma(x) for x in call[:2])
            initial = call.initial_state
            final = torch.empty(batch, heads, k.shape[3], values + 1, dtype=torch.float32, device=v.device)
            finals.append(final)
            if v.numel() == 0:
                final.zero_() if initial is None else final.copy_(initial)
                continue
            total_norm = norm[0] if i + 1 == len(calls) else torch.empty_like(norm[0])
            norms = launch.Norms(total_norm, norm[1 + i], slices_norm)
            inputs = launch.Inputs(q, k, v, DecayAndBeta(call.g, call.beta, call.scale), call.stabilizer, call.eps)
            launch.run_fwd(inputs, o, norms, aligned(initial), final, plan["stages"], each)
            slices_norm = total_norm
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
        room: GradRoom = GradRoom(),  # noqa: B008
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients of q, k, v, g, beta and m, and of the initial state.

        norm: what forward returned; None runs it again. o is read where the call is a slice of K.
        """
        from holdfast.kernels.lib.triton.group_sum import ungroup
        from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta
        from holdfast.kernels.matrix.mlstm.triton.row_dot import row_dot
        from holdfast.kernels.runtime.tma import aligned, for_tma, room_or_empty

        from . import launch

        q, k, v = (for_tma(x) for x in call[:3])
        batch, length, heads, values = v.shape
        keys = k.shape[3]
        initial, dfinal = aligned(call.initial_state), aligned(grad_final)
        grad_state = None if initial is None else torch.empty_like(initial)
        if v.numel() == 0:
            if grad_state is not None:
                grad_state = grad_state.zero_() if dfinal is None else grad_state.copy_(dfinal)
            return [torch.zeros_like(x) for x in call[:6]], grad_state
        if norm is None:
            norm = self.forward(plan, call, cu_seqlens)[2]
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if grad_o is None else for_tma(grad_o)

        inputs = launch.Inputs(q, k, v, DecayAndBeta(call.g, call.beta, call.scale), call.stabilizer, call.eps)
        save, chunks = plan["save"], -(-length // TOKENS)
        entries = -(-chunks // save)
        saved = torch.empty(batch, heads, entries, keys, values, dtype=v.dtype, device=v.device)
        saved_n = torch.empty(batch, heads, entries, keys, dtype=torch.float32, device=v.device)
        token = torch.empty(4, *norm.shape[1:], dtype=norm.dtype, device=norm.device)
        residuals = launch.Residuals(token, saved, saved_n, save)
        last_entry = None if dfinal is None else torch.empty_like(dfinal)
        dq, dk = (room_or_empty(into, (batch, length, heads, keys), v) for into in room[:2])
        dv = room_or_empty(room.v, v.shape, v)
        slices = Cut.of(plan).key_slices
        do_o = row_dot(do, o) if slices > 1 else None
        launch.run_bwd_q(inputs, do, dq, norm, initial, last_entry, residuals, plan["stages"], do_o)
        state_grad_dot = None if dfinal is None else (last_entry * dfinal).sum((2, 3))
        dg, dbeta = (torch.empty_like(token[0]).transpose(1, 2) for _ in range(2))
        product = None if dfinal is None else torch.empty_like(state_grad_dot)
        grads = launch.Grads(dk, dv, dg, dbeta, product)
        launch.run_bwd_kv(
            inputs, do, grads, initial, dfinal, grad_state, state_grad_dot, residuals, plan["adjoint_stages"]
        )
        # of the whole: each slice of K has it
        dm = token[2] / slices if slices > 1 else token[2]
        if product is not None:
            # the final state is in units of the last m; of the same sums as dg, so that what cancels beside that does
            dm[..., -1] -= product
        return [*ungroup(dq, dk, q.shape[2]), dv, dg, dbeta, dm.transpose(1, 2)], grad_state
