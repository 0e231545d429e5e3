"""Vector decay on Hopper: forward in one launch; backward the same kernel in reverse for dv, then all chunks at once.

A forward pass that a backward pass may follow saves the state before each chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import AnothersKernel, refusal
from holdfast.kernels.matrix.variants import GradRoom, SavedShape
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.tiles import WIDEST, chunk_places, tile
from holdfast.planner.models.matrix.vector_decay import hopper as model
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {"delta": "the delta rule", "normalizer": "a normaliser"}
# tokens that the grid of backward_grads.py has room for
LONGEST = 65535 * model.CHUNK


class HopperGLA:
    """GLA, and SSD with a rate a key channel, in bfloat16 or float16 on NVIDIA's Hopper."""

    name = "hopper"
    takes_room = True
    uses_forward_output = True
    # g may have fewer heads than v, each for some of these; its gradient has v's
    groups_decays = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if "decay=vector" not in problem.traits:
            return AnothersKernel("it takes one log decay a key channel")
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
        return SavedShape(saved_sizes(shape, problem["K"], sequences), getattr(torch, problem.dtype))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        """Return o, the final state and, if the plan saves them, the states before each chunk."""
        o, (final,), *saved = self.forward_rows(plan, [call], cu_seqlens)
        return o, final, *saved

    def forward_rows(self, plan: Plan, calls: Sequence[MatrixCall], cu_seqlens: Tensor | None) -> tuple[Any, ...]:
        """Do what forward does for a call in slices of K, one call each beside the same v; final states are a list.

        The plan saves states of a whole call alone.
        """
        from holdfast.kernels import varlen
        from holdfast.kernels.matrix.args import slice_sums
        from holdfast.kernels.runtime.tma import aligned

        from . import launch

        shape, dtype, device = calls[0].v.shape, calls[0].v.dtype, calls[0].v.device
        cu_seqlens = varlen.on_device(cu_seqlens, shape[1], device)
        o = torch.empty(shape, dtype=dtype, device=device)
        sums = [None] if len(calls) == 1 else slice_sums(o, tile(shape[3]), len(calls), cu_seqlens)
        finals, saved = [], None
        for call, each in zip(calls, sums, strict=True):
            inputs = launch.Inputs.of(call, cu_seqlens)
            final = torch.empty(_state_shape(call, cu_seqlens), dtype=torch.float32, device=device)
            finals.append(final)
            if plan["saves"]:
                sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
                sizes = saved_sizes(shape, inputs.k.shape[3], sequences)
                saved = torch.empty(sizes, dtype=dtype, device=device)
            if inputs.v.numel() == 0:
                final.zero_() if call.initial_state is None else final.copy_(call.initial_state)
                continue
            states = launch.States(aligned(call.initial_state), final, saved)
            launch.run_forward(inputs, inputs.v, o, states, sums=each)
        return (o, finals) if saved is None else (o, finals, saved)

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        o: Tensor | None = None,
        states: Tensor | None = None,
        room: GradRoom = GradRoom(),  # noqa: B008
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients of call[:6] and of the initial state. o is not read.

        states: what forward saved; without them, it runs again.
        """
        from holdfast.kernels import varlen
        from holdfast.kernels.lib.triton.group_sum import ungroup
        from holdfast.kernels.runtime.tma import aligned, for_tma, room_or_empty

        from . import launch

        cu_seqlens = varlen.on_device(cu_seqlens, call.v.shape[1], call.v.device)
        inputs = launch.Inputs.of(call, cu_seqlens)
        v, keys = inputs.v, inputs.k.shape[3]
        dfinal = aligned(grad_final)
        dinitial = None
        if call.initial_state is not None:
            dinitial = torch.empty(_state_shape(call, cu_seqlens), dtype=torch.float32, device=v.device)
        if v.numel() == 0:
            if dinitial is not None:
                dinitial = dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
            grads = [None if x is None else torch.zeros_like(x) for x in call[:6]]
            grads[3] = inputs.g.new_zeros(*v.shape[:3], inputs.g.shape[3])
            return grads, dinitial
        if states is None:
            _, _, states = self.forward(model.plan(saves=True), call, cu_seqlens)
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if grad_o is None else for_tma(grad_o)
        heads = (*v.shape[:3], keys)
        dq, dk = launch.room_for_queries_and_keys(room, heads, v)
        dg = torch.empty(heads, dtype=torch.float32, device=v.device)
        # the ends of packed sequences are stored by address, as of dense tensors
        dv = room_or_empty(room.v if cu_seqlens is None else None, v.shape, v)
        dbeta = None
        if inputs.beta is not None:
            parts = -(-inputs.g.shape[3] // model.CHUNK)
            dbeta = torch.empty(parts, *inputs.beta.shape, dtype=torch.float32, device=v.device)
        # a chunk of a packed sequence is not where its gradients are
        dstates = launch.room_for_dstates(dq, dg, states) if cu_seqlens is None else torch.empty_like(states)
        launch.run_forward(inputs, do, dv, launch.States(dfinal, dinitial, dstates), reverse=True)
        launch.run_grads(inputs, do, states, dstates, launch.Grads(dq, dk, dg, dbeta))
        assert call.g is not None
        if dbeta is not None:
            assert call.beta is not None
            dbeta = dbeta.sum(0).to(call.beta.dtype)
        return [*ungroup(dq, dk, inputs.q.shape[2]), dv, dg.to(call.g.dtype), dbeta, None], dinitial


def saved_sizes(shape: Sequence[int], keys: int, sequences: int | None) -> tuple[int, int, int, int]:
    """Return the sizes of the states before all chunks of 64 tokens, as the kernels save and read them.

    shape: v's. sequences: how many are packed, if they are.
    """
    batch, length, heads, values = shape
    return batch, chunk_places(length, sequences) * model.CHUNK, heads, tile(keys) * tile(values) // model.CHUNK


def _state_shape(call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    sequences = call.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3]
