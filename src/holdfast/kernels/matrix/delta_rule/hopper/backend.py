"""The delta rule on Hopper: chunks' inverses side by side, then a kernel over the chunks; backward, two of these."""

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.support import without_gluon
from holdfast.kernels.matrix.refusal import AnothersKernel, refusal
from holdfast.kernels.matrix.small_heads import REFUSAL, is_small
from holdfast.kernels.matrix.variants import SavedShape
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.delta_rule import hopper as model
from holdfast.planner.models.matrix.delta_rule import hopper_wide as wide
from holdfast.planner.models.matrix.delta_rule.triton import WIDEST as GRADIENTS_WIDEST
from holdfast.planner.models.matrix.tiles import WIDEST, chunk_places
from holdfast.recurrences.definition import MatrixCall

_UNSERVED = {
    "decay=vector": "a vector decay",
    "normalizer": "a normaliser",
    "erase_key": "an erase key beside the write key",
}
# tokens that the grid of chunk_inverse.py has room for
LONGEST = 65535 * model.CHUNK


class HopperDelta:
    """DeltaNet and Gated DeltaNet in bfloat16 or float16 on NVIDIA's Hopper."""

    name = "hopper"
    uses_forward_output = True

    def reject(self, problem: Problem, device: Device) -> str | None:
        if "delta" not in problem.traits:
            return AnothersKernel("it has the delta rule alone")
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        if is_small(problem):
            return REFUSAL
        if problem["K"] > wide.WIDEST:
            return f"its registers hold a state of {wide.WIDEST} rows; got K = {problem['K']}"
        if problem.needs_grad and problem["K"] <= WIDEST and problem["V"] > GRADIENTS_WIDEST:
            return f"its gradients take a V up to {GRADIENTS_WIDEST}; got {problem['V']}"
        if problem["T"] > LONGEST:
            return f"a grid has an axis of 65535 chunks at most: it needs a T up to {LONGEST}; got {problem['T']}"
        return without_gluon()

    def saved_shape(self, problem: Problem) -> SavedShape | None:
        """The inverses of all chunks, as `run_chunk_inverse` returns them."""
        if not model.saves_inverses(problem):
            return None
        sequences = problem["N"] if problem.varlen else None
        chunks = chunk_places(problem["T"], sequences)
        sizes = (problem["B"] * problem["H"], chunks, model.CHUNK, model.CHUNK)
        return SavedShape(sizes, getattr(torch, problem.dtype))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (model if problem["K"] <= WIDEST else wide).candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        """Return o, the final state and, if the plan saves them, the inverses of all chunks."""
        from holdfast.kernels import varlen
        from holdfast.kernels.runtime.tma import aligned

        if call.k.shape[3] > WIDEST:
            from holdfast.kernels.matrix.delta_rule.hopper.wide.launch import WidePasses
            from holdfast.kernels.matrix.delta_rule.triton import launch as triton_launch

            with torch.cuda.device_of(call.v):
                return triton_launch.forward(plan, call, cu_seqlens, WidePasses)
        from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta
        from holdfast.kernels.runtime.tma import for_tma

        from . import launch_forward as launch

        q, k, v = (for_tma(x) for x in call[:3])
        batch, length, heads, values = v.shape
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        cu_seqlens = varlen.on_device(cu_seqlens, length, v.device)
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = torch.empty(sequences, heads, k.shape[3], values, dtype=torch.float32, device=v.device)
        if v.numel() == 0:
            return o, final.zero_() if call.initial_state is None else final.copy_(call.initial_state)
        start = aligned(call.initial_state)
        gates, stages, chunks = DecayAndBeta(call.g, call.beta, call.scale), plan["stages"], plan["segment_chunks"]
        a = launch.run_chunk_inverse(k, heads, gates, cu_seqlens)
        if chunks * TOKENS < length:
            tiling = launch.Tiling(plan["state_columns"], stages, chunks)
            start = launch.segment_initial_states(k, v, a, gates, tiling, start, None, cu_seqlens)
        tiling = launch.Tiling(plan["columns"], stages, chunks)
        launch.run_forward(q, k, v, a, o, gates, launch.StateIO(start, final), tiling, cu_seqlens)
        return (o, final, a) if plan["saves"] else (o, final)

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        o: Tensor | None = None,
        a: Tensor | None = None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients of call[:6] and of the initial state. o is not read.

        a: what forward saved; without it, it is found again.
        """
        from holdfast.kernels.matrix.delta_rule.triton import launch as triton_launch

        from . import launch_backward

        if call.k.shape[3] > WIDEST:
            from holdfast.kernels.matrix.delta_rule.hopper.wide.launch import WidePasses

            with torch.cuda.device_of(call.v):
                return triton_launch.backward(plan, call, cu_seqlens, grad_o, grad_final, WidePasses)
        if plan.backend == self.name:
            return launch_backward.backward(plan, call, cu_seqlens, grad_o, grad_final, a)
        # v is wider than the gradients' kernels here take
        with torch.cuda.device_of(call.v):
            return triton_launch.backward(plan, call, cu_seqlens, grad_o, grad_final)
