"""The log decay of a gate, one launch a pass, in float32."""

import torch
from torch import Tensor

# channels of a row, which a block holds
WIDEST = 8192
# elements a thread; programs of the backward pass, which sum the bias's gradient
HELD, PARTS = 8, 528


class TritonLogGate:
    """x in at most 32 bits on an NVIDIA GPU from Ampere on, of at most 8192 channels."""

    def forward(self, x: Tensor, bias: Tensor, normalizer: float) -> Tensor:
        """Return logsigmoid(x + bias) / normalizer of x [B, T, D] and bias [D], in float32."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .rows import log_gate_fwd

        g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if x.numel():
            count, tiles, constants, warps = _shape(x)
            with on_device_of(x):
                tensors, numbers = (x.contiguous(), bias.contiguous(), g), (count, 1.0 / normalizer)
                launch(log_gate_fwd, (tiles,), tensors, numbers, constants, warps)
        return g

    def backward(self, x: Tensor, bias: Tensor, normalizer: float, dg: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and bias, contiguous, in their dtypes."""
        from holdfast.kernels.lib.triton.column_sums import column_sums, of_parts
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .rows import log_gate_bwd

        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        count, tiles, constants, warps = _shape(x)
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=x.device)
        parts = torch.empty(min(PARTS, tiles), x.shape[2], dtype=torch.float32, device=x.device)
        with on_device_of(x):
            if x.numel():
                tensors = (x.contiguous(), bias.contiguous(), dg.contiguous(), dx, parts)
                launch(log_gate_bwd, (parts.shape[0],), tensors, (count, 1.0 / normalizer), constants, warps)
                launch(column_sums, *of_parts(parts, dbias))
            else:
                dbias.zero_()
        return dx, dbias


def _shape(x: Tensor) -> tuple[int, int, dict[str, int], int]:
    """Return rows, tiles of them, constants and warps."""
    batch, length, channels = x.shape
    block = 1 << (channels - 1).bit_length()
    warps = max(4, min(16, block // (32 * HELD)))
    rows = max(1, 32 * warps * HELD // block)
    return batch * length, -(-batch * length // rows), {"D": channels, "BLOCK": block, "ROWS": rows}, warps
