"""The selective scan as Triton kernels, on NVIDIA GPUs from Ampere on, in float32 inside."""

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.selective import triton as model
from holdfast.recurrences.definition import SelectiveCall

# of a SelectiveCall's tensors, in its order
Grads = tuple[Tensor | None, ...]


class TritonSelective:
    """Selective scans with up to 256 numbers of state a channel."""

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["N"] > model.MOST_NUMBERS:
            return f"it takes an N of {model.MOST_NUMBERS} at most; got {problem['N']}"
        if problem["D"] > model.MOST_CHANNELS:
            return f"it takes {model.MOST_CHANNELS} channels at most; got {problem['D']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: SelectiveCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, T, D] in x's dtype and the final state [sequences, D, N]; fill entries, where given."""
        from .launch import Run

        with torch.cuda.device_of(call.x):
            run = Run(plan, call, cu_seqlens)
            y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            final = call.x.new_empty(run.sequences, *call.A.shape, dtype=torch.float32)
            run.forward(y, final, entries)
            return y, final

    def update(self, plan: Plan, call: SelectiveCall) -> Tensor:
        """Return y of a few tokens; the call's initial state, contiguous, is overwritten by the state after them."""
        from .launch import Run

        assert call.initial_state is not None
        with torch.cuda.device_of(call.x):
            y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            Run(plan, call, None).forward(y, call.initial_state, None)
            return y

    def backward(
        self,
        plan: Plan,
        call: SelectiveCall,
        cu_seqlens: Tensor | None,
        entries: Tensor | None,
        grad_y: Tensor | None,
        grad_final: Tensor | None,
    ) -> Grads:
        """Return the gradients of the call's tensors, None for one that was not given; entries: forward's."""
        from .launch import Run

        with torch.cuda.device_of(call.x):
            return Run(plan, call, cu_seqlens).backward(entries, grad_y, grad_final)
