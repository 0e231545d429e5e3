"""RMS or layer normalisation with an output gate as Triton kernels: one pass over o and gate, forward and backward."""

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.norm import triton as model


class TritonGatedNorm:
    """Rows of at most 8192 channels on NVIDIA GPUs from Ampere on, in float32 throughout.

    The backward pass computes the mean again, so that nothing beside the inputs is saved.
    """

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["D"] > model.WIDEST:
            return f"D is at most {model.WIDEST}; got {problem['D']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: GatedNormCall) -> Tensor:
        """Return y [B, T, H, D], contiguous, in o's dtype."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from . import rows

        run = _Run(plan, call)
        y = torch.empty(call.o.shape, dtype=call.o.dtype, device=call.o.device)
        if y.numel():
            tensors = (run.o, run.gate, run.weight, y)
            numbers = (run.count, *call.o.shape[1:3], call.eps, *run.strides(run.o), *run.strides(run.gate))
            with on_device_of(y):
                launch(rows.norm_fwd, (run.tiles * run.heads,), tensors, numbers, run.constants(), plan["warps"])
        return y

    def backward(
        self, plan: Plan, call: GatedNormCall, grad_y: Tensor, into: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of o, gate and weight, None where the input is.

        into: where that of gate goes, part of a wider tensor.
        """
        from holdfast.kernels.lib.triton.column_sums import column_sums, of_parts
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from . import rows

        run, dy = _Run(plan, call), _dense(grad_y)
        do = torch.empty(call.o.shape, dtype=call.o.dtype, device=call.o.device)
        dgate = None if call.gate is None else torch.empty_like(do) if into is None else into
        parts = dweight = None
        if call.weight is not None:
            parts = torch.empty(plan["parts"], *call.weight.shape, dtype=torch.float32, device=do.device)
            dweight = torch.empty(call.weight.shape, dtype=call.weight.dtype, device=do.device)
        with on_device_of(do):
            if do.numel():
                tensors = (run.o, run.gate, run.weight, dy, do, dgate, parts)
                strides = (stride for x in (run.o, run.gate, dy, dgate) for stride in run.strides(x))
                numbers = (run.count, run.tiles, *call.o.shape[1:3], call.eps, *strides)
                launch(rows.norm_bwd, (plan["parts"] * run.heads,), tensors, numbers, run.constants(), plan["warps"])
                if parts is not None and dweight is not None:
                    launch(column_sums, *of_parts(parts, dweight))
            elif dweight is not None:
                dweight.zero_()
        return [do, dgate, dweight]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Run:
    """A call as the kernels take it. heads: those with a weight of their own; count: rows of each."""

    def __init__(self, plan: Plan, call: GatedNormCall) -> None:
        batch, length, heads, width = call.o.shape
        self.o = _dense(call.o)
        self.gate = None if call.gate is None else _dense(call.gate)
        self.weight = None if call.weight is None else call.weight.contiguous()
        self.heads = 1 if call.weight is None or call.weight.dim() == 1 else call.weight.shape[0]
        self.count = batch * length * heads // self.heads
        self.tiles = -(-self.count // plan["rows"])
        self._constants = {
            "D": width,
            "BLOCK_D": model.covering(width),
            "ROWS": plan["rows"],
            "HEADS": self.heads,
            "SIGMOID": call.activation == "sigmoid",
            "CENTER": call.center,
        }

    def constants(self) -> dict[str, int]:
        return self._constants

    @staticmethod
    def strides(x: Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if x is None else x.stride()[:3]
