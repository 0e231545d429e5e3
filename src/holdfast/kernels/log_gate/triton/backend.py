"""The log decay of a gate by one launch a pass, in float32."""

import torch
from torch import Tensor

# numbers of a program, 8 a thread
BLOCK, WARPS = 1024, 4


class TritonLogGate:
    """x in at most 32 bits on an NVIDIA GPU from Ampere on."""

    def forward(self, x: Tensor, normalizer: float) -> Tensor:
        """logsigmoid(x) / normalizer in float32, contiguous."""
        from holdfast.kernels.common.triton_launch import launch, on_device_of

        from .rows import log_gate_forward

        g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if count := x.numel():
            tensors, numbers = (x.contiguous(), g), (count, 1.0 / normalizer)
            with on_device_of(x):
                launch(log_gate_forward, (-(-count // BLOCK),), tensors, numbers, {"BLOCK": BLOCK}, WARPS)
        return g

    def backward(self, x: Tensor, normalizer: float, dg: Tensor) -> Tensor:
        """The gradient of x, contiguous, in its dtype."""
        from holdfast.kernels.common.triton_launch import launch, on_device_of

        from .rows import log_gate_backward

        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if count := x.numel():
            tensors, numbers = (x.contiguous(), dg.contiguous(), dx), (count, 1.0 / normalizer)
            with on_device_of(x):
                launch(log_gate_backward, (-(-count // BLOCK),), tensors, numbers, {"BLOCK": BLOCK}, WARPS)
        return dx
