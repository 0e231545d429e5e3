"""The scan of states between chunks as Triton kernels, the state in registers; see states.py."""

import torch
from torch import Tensor

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.varlen import placed, sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.chunk.inter import triton as model

# of states, decay, W, Y and the initial state
Grads = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


class TritonInterChunkScan:
    """Scalar and row decay, low rank up to 16, on NVIDIA GPUs from Ampere on, in float32 inside.

    Without W and Y, the bits are those of the plain loop.
    """

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if "low_rank" in problem.traits:
            if problem["r"] > model.HIGHEST_RANK:
                return f"W and Y have rank {model.HIGHEST_RANK} at most; got {problem['r']}"
            if problem["K"] > model.MOST_ROWS:
                return f"K is at most {model.MOST_ROWS} beside W and Y; got {problem['K']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: InterChunkCall, cu_seqlens: Tensor | None, keep_final: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return h_1 .. h_G [B, G, H, K, V] in states' dtype, and the final state [N, H, K, V] if keep_final."""
        with torch.cuda.device_of(call.states):
            run = self._run(plan, call, cu_seqlens)
            out = torch.empty_like(call.states, memory_format=torch.contiguous_format)
            return out, run.forward(out, keep_final)

    def backward(
        self,
        plan: Plan,
        call: InterChunkCall,
        cu_seqlens: Tensor | None,
        history: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
    ) -> Grads:
        """Return the gradients of states, decay, W, Y and the initial state.

        history: the forward's output where it is float32; None where it was rounded, to run forward again.
        """
        with torch.cuda.device_of(call.states):
            run = self._run(plan, call, cu_seqlens)
            if history is None:
                history = torch.empty(call.states.shape, dtype=torch.float32, device=call.states.device)
                run.forward(history, keep_final=False)
            return run.backward(history, grad_o, grad_final)

    def _run(self, plan: Plan, call: InterChunkCall, cu_seqlens: Tensor | None) -> "Run":
        return Run(plan, call, cu_seqlens)


class Run:
    """One call, its tensors contiguous."""

    def __init__(self, plan: Plan, call: InterChunkCall, cu_seqlens: Tensor | None) -> None:
        self.plan = plan
        self.call = InterChunkCall(*(None if x is None else x.contiguous() for x in call))
        self.batch, self.chunks, self.heads, self.keys, self.values = call.states.shape
        bounds, self.sequences = None, self.batch
        if cu_seqlens is not None:
            sequence_bounds(cu_seqlens, self.chunks)
            bounds, self.sequences = placed(cu_seqlens, call.states.device), cu_seqlens.shape[0] - 1
        self.sizes = (bounds, self.chunks, self.heads, self.keys, self.values)
        self.rank = 0 if call.W is None else call.W.shape[4]
        self.padded_rank = 1 << max(self.rank - 1, 0).bit_length()
        self.scalar = call.decay.dim() == 3
        self.down = -(-self.keys // plan["block_k"])
        self.across = -(-self.values // plan["block_v"])
        self.grid = (self.down * self.across * self.heads * self.sequences,)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.call.states.device)

    def forward(self, out: Tensor, keep_final: bool) -> Tensor | None:
        """Fill out with the state after each chunk and return the final state if keep_final.

        It is a tensor of its own, since out may be rounded.
        """
        from holdfast.kernels.runtime.launch import launch_by_triton

        from . import states as kernels

        call, plan = self.call, self.plan
        final = self._empty(self.sequences, self.heads, self.keys, self.values) if keep_final else None
        if not all(self.grid):
            return final
        outputs = (out, call.initial_state, final)
        blocks = {"SCALAR": self.scalar, "BLOCK_K": plan["block_k"], "BLOCK_V": plan["block_v"]}
        # the plain loop rounds products before it adds; sums over rows have no such order to keep
        how = {"num_warps": plan["warps"], "enable_fp_fusion": bool(self.rank)}
        if self.rank:
            launch_by_triton(
                kernels.inter_chunk_low_rank_fwd,
                self.grid,
                call.states,
                call.decay,
                call.W,
                call.Y,
                *outputs,
                *self.sizes,
                **blocks,
                RANK=self.rank,
                BLOCK_R=max(16, self.padded_rank),
                STAGES=plan["group"],
                **how,
            )
        else:
            how |= {**blocks, "GROUP": plan["group"]}
            launch_by_triton(kernels.inter_chunk_fwd, self.grid, call.states, call.decay, *outputs, *self.sizes, **how)
        return final

    def backward(self, history: Tensor, grad_o: Tensor | None, grad_final: Tensor | None) -> Grads:
        call = self.call
        dstates = torch.empty_like(call.states)
        dinitial = self._empty(self.sequences, self.heads, self.keys, self.values)
        # sums that several programs share come in parts
        parts = self.down * self.across if self.scalar else self.across
        ddecay = self._empty(parts, *call.decay.shape)
        dW, dY = (None if x is None else self._empty(self.across, *x.shape) for x in (call.W, call.Y))
        if dinitial.numel():
            given = (
                None if grad_o is None else grad_o.contiguous(),
                call.initial_state,
                None if grad_final is None else grad_final.float().contiguous(),
            )
            found = (dstates, ddecay, dW, dY, dinitial)
            self._launch_backward((call.decay, call.W, call.Y, history, *given, *found))

        def summed(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if parts is None else parts.sum(0).to(like.dtype)

        return (
            dstates,
            summed(ddecay, call.decay),
            summed(dW, call.W),
            summed(dY, call.Y),
            dinitial,
        )

    def _launch_backward(self, tensors: tuple[Tensor | None, ...]) -> None:
        from holdfast.kernels.runtime.launch import launch_by_triton

        from . import states as kernels

        plan = self.plan
        launch_by_triton(
            kernels.inter_chunk_bwd,
            self.grid,
            *tensors,
            *self.sizes,
            self.batch * self.chunks * self.heads,
            SCALAR=self.scalar,
            RANK=self.rank,
            BLOCK_K=plan["block_k"],
            BLOCK_V=plan["block_v"],
            BLOCK_R=self.padded_rank,
            STAGES=plan["stages"],
            num_warps=plan["warps"],
        )
