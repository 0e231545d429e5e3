"""The additive recurrence with scalar decay on Hopper: forward in one launch, backward in two.

With do the gradient of o, the gradient of q is the forward kernel again with roles exchanged, dq = fwd(q=do, k=v, v=k):
it computes the states again, so that none is saved by the forward pass. The backward kernel gives dk, dv, dg, dbeta and
the gradient of the initial state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import refusal
from holdfast.kernels.matrix.variants import GradRoom
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.scalar_decay import hopper as model
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {
    "delta": "the delta rule",
    "decay=vector": "a vector decay",
    "normalizer": "a normaliser",
}


class Hopper:
    """Linear attention, RetNet, Lightning, simple GLA and SSD in bfloat16 or float16 on NVIDIA's Hopper."""

    name = "hopper"
    takes_room = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        for name in "KV":
            # without gradients V is cut into slices
            if problem[name] > model.WIDEST and (name == "K" or problem.needs_grad):
                return f"its registers hold a state of {model.WIDEST} x {model.WIDEST}; got {name} = {problem[name]}"
        return without_gluon()

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        o, (final,) = self.forward_rows(plan, [call], cu_seqlens)
        return o, final

    def forward_rows(
        self, plan: Plan, calls: Sequence[MatrixCall], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """o, and the final state of each slice of K. calls: a slice each, beside the same v."""
        from holdfast.kernels.matrix.args import slice_sums
        from holdfast.kernels.runtime.tma import for_tma

        v = for_tma(calls[0].v)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        cu_seqlens = varlen.on_device(cu_seqlens, v.shape[1], v.device)
        sums = [None] if len(calls) == 1 else slice_sums(o, plan["columns"], len(calls), cu_seqlens)
        return o, [
            self._forward_slice(plan, call, v, o, cu_seqlens, each) for call, each in zip(calls, sums, strict=True)
        ]

    def _forward_slice(
        self, plan: Plan, call: MatrixCall, v: Tensor, o: Tensor, cu_seqlens: Tensor | None, sums: Any
    ) -> Tensor:
        """Return the final state; fill o or, with more slices to come, sums."""
        from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, StateIO
        from holdfast.kernels.matrix.state_passing.hopper.launch import segment_sums
        from holdfast.kernels.runtime.tma import aligned, for_tma

        from .launch import ForwardPlan, run_forward
        from .onchip.launch import run_onchip

        q, k = (for_tma(x) for x in call[:2])
        final = torch.empty(_state_shape(call, cu_seqlens), dtype=torch.float32, device=v.device)
        if v.numel() == 0:
            return final.zero_() if call.initial_state is None else final.copy_(call.initial_state)
        start, segment_chunks = aligned(call.initial_state), plan["segment_chunks"]
        gates = DecayAndBeta(call.g, call.beta, call.scale)
        if plan["resident"]:
            run_onchip(q, k, v, o, gates, start, final)
            return final
        states = StateIO(start, final)
        if cu_seqlens is None and segment_chunks * TOKENS < v.shape[1]:
            states = StateIO(start, final, added=segment_sums(k, v, gates, segment_chunks))
        forward_plan = ForwardPlan(plan["columns"], plan["stages"], segment_chunks)
        run_forward(q, k, v, o, gates, states, forward_plan, None, cu_seqlens, sums)
        return final

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        room: GradRoom = GradRoom(),  # noqa: B008
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from holdfast.kernels.lib.triton.group_sum import ungroup
        from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, Residuals, StateIO
        from holdfast.kernels.matrix.state_passing.hopper.launch import ScanOperands, segment_initial_states
        from holdfast.kernels.runtime.tma import aligned, for_tma, room_or_empty, round_up_columns

        from . import launch

        q, k, v = (for_tma(x) for x in call[:3])
        cu_seqlens = varlen.on_device(cu_seqlens, call.v.shape[1], call.v.device)
        shape = _state_shape(call, cu_seqlens)
        sequences, heads, keys, values = shape
        batch, length, device, save = v.shape[0], v.shape[1], v.device, plan["save"]
        start, w = aligned(call.initial_state), aligned(grad_final)
        grad_state = None if start is None else torch.empty(shape, dtype=torch.float32, device=device)
        if v.numel() == 0:
            if grad_state is not None:
                grad_state = grad_state.zero_() if w is None else grad_state.copy_(w)
            return [None if x is None else torch.zeros_like(x) for x in call[:6]], grad_state
        do = torch.zeros(v.shape, dtype=v.dtype, device=device) if grad_o is None else for_tma(grad_o)

        gates = DecayAndBeta(call.g, call.beta, call.scale)
        stages, segment_chunks = plan["stages"], plan["segment_chunks"]
        states, grad_states = StateIO(start, transposed=True), StateIO(w, grad_state)
        segments = 1 if cu_seqlens is not None else -(-length // (segment_chunks * TOKENS))
        if segments > 1:
            forth, back = ScanOperands(k, v, start), ScanOperands(q, do, w)
            starts, grad_starts = segment_initial_states(forth, back, grad_state, gates, segment_chunks)
            states, grad_states = StateIO(starts, transposed=True), StateIO(grad_starts)
        residuals = dg = None
        if call.g is not None:
            entries = segments * -(-segment_chunks // save)
            if cu_seqlens is not None:
                entries = length // (save * TOKENS) + sequences
            saved = torch.empty(batch, heads, entries, keys * values, dtype=v.dtype, device=device)
            rows = torch.empty(-(-keys // plan["columns"]), batch, heads, length, dtype=torch.float32, device=device)
            log = torch.empty(batch, heads, length, dtype=torch.float32, device=device)
            residuals = Residuals(q, rows, log, saved, save, states.start is None)
            dg = torch.empty_like(call.g, memory_format=torch.contiguous_format)
            if grad_states.start is not None:
                passing = torch.empty(rows.shape[0], sequences, segments, heads, dtype=torch.float32, device=device)
                size = round_up_columns(values) * plan["columns"]
                before = torch.empty(passing.numel(), size, dtype=torch.float32, device=device)
                states = StateIO(states.start, None, True, grad_states.start, before, passing)
        dbeta = None if call.beta is None else torch.empty_like(call.beta, memory_format=torch.contiguous_format)
        if cu_seqlens is not None:
            # the ends of packed sequences are stored by address, as of dense tensors
            room = GradRoom()
        dq, dk = (room_or_empty(into, (batch, length, heads, keys), v) for into in room[:2])
        dv = room_or_empty(room.v, v.shape, v)
        forward_plan = launch.ForwardPlan(plan["columns"], stages, segment_chunks)
        launch.run_forward(do, v, k, dq, gates, states, forward_plan, residuals, cu_seqlens)
        inputs, grads = launch.BackwardInputs(q, k, do, v), launch.Grads(dk, dv, dg, dbeta)
        launch.run_backward(
            inputs, grads, gates, grad_states, plan["adjoint_stages"], segment_chunks, residuals, states.passing,
            cu_seqlens,
        )  # fmt: skip
        return [*ungroup(dq, dk, q.shape[2]), dv, dg, dbeta, None], grad_state


def _state_shape(call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    sequences = call.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3]
