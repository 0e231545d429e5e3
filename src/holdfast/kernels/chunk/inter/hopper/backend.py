"""The scan of states between chunks with a low rank on Hopper; see forward.py and backward.py."""

from torch import Tensor

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.inter.triton.backend import Run, TritonInterChunkScan
from holdfast.kernels.lib.gluon.support import refusal, without_gluon
from holdfast.kernels.lib.triton.support import DTYPES
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.chunk.inter import hopper as model


class HopperInterChunkScan(TritonInterChunkScan):
    """Low ranks that are powers of two, up to 16, on NVIDIA's Hopper, in float32 inside."""

    name = "hopper"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device, DTYPES):
            return reason
        if "low_rank" not in problem.traits:
            return "it serves low ranks only"
        if problem["r"] not in model.RANKS:
            return f"W and Y have a rank of {', '.join(map(str, model.RANKS))}; got {problem['r']}"
        if problem["K"] not in model.KEYS:
            return f"it takes K of {', '.join(map(str, model.KEYS))}; got {problem['K']}"
        if problem["V"] % (least := min(model.WIDTHS)):
            return f"it copies {least} columns at a time: V must be a multiple; got {problem['V']}"
        return without_gluon() or super().reject(problem, device)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def _run(self, plan: Plan, call: InterChunkCall, cu_seqlens: Tensor | None) -> Run:
        return _Run(plan, call, cu_seqlens)


class _Run(Run):
    def forward(self, out: Tensor, keep_final: bool) -> Tensor | None:
        from holdfast.kernels.runtime.launch import launch_by_triton
        from holdfast.kernels.runtime.tma import aligned

        from . import forward as kernels

        call = InterChunkCall(*(aligned(x) for x in self.call))
        final = self._empty(self.sequences, self.heads, self.keys, self.values) if keep_final else None
        if all(self.grid):
            plan = self.plan
            outputs = (out, call.initial_state, final)
            how = {"SCALAR": self.scalar, "RANK": self.rank, "BLOCK_V": plan["block_v"], "STAGES": plan["group"]}
            tensors = (call.states, call.decay, call.W, call.Y, *outputs)
            # given no bound, ptxas aims at so few registers that loads are waited for where they are used
            how |= {"num_warps": plan["warps"], "maxnreg": model.REGISTERS}
            launch_by_triton(kernels.inter_chunk_low_rank_fwd_async, self.grid, *tensors, *self.sizes, **how)
        return final

    def _launch_backward(self, tensors: tuple[Tensor | None, ...]) -> None:
        from holdfast.kernels.runtime.launch import launch_by_triton
        from holdfast.kernels.runtime.tma import aligned

        from . import backward as kernels

        ready = (aligned(x) for x in tensors)
        places = self.batch * self.chunks * self.heads
        plan = self.plan
        how = {"SCALAR": self.scalar, "RANK": self.rank, "BLOCK_V": plan["block_v"], "STAGES": plan["stages"]}
        how["num_warps"] = plan["warps"]
        launch_by_triton(kernels.inter_chunk_low_rank_bwd_async, self.grid, *ready, *self.sizes, places, **how)
