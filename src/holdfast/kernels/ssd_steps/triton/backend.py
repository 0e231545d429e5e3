"""Step sizes and log decays of SSD, one launch a pass, in float32."""

from typing import Any

import torch
from torch import Tensor

from ..call import StepsCall

# elements of a tile, 4 a thread
TILE, WARPS = 512, 4
# blocks that sum the gradients of A and dt_bias
PARTS = 128
# elements of a tile of the sums
SUMMED = 2048


class TritonSteps:
    """Calls without float64 on an NVIDIA GPU from Ampere on."""

    def forward(self, call: StepsCall) -> tuple[Tensor, Tensor]:
        """Return the step sizes and the log decays, [B, T, H] float32."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .forward import ssd_steps_fwd

        dt = call.dt
        step, g = (torch.empty(dt.shape, dtype=torch.float32, device=dt.device) for _ in range(2))
        if dt.numel():
            tensors = (dt, *_heads(call), step, g)
            numbers = (dt.shape[0] * dt.shape[1], *dt.shape[1:], *dt.stride())
            tiles, constants = _shape(call)
            with on_device_of(dt):
                launch(ssd_steps_fwd, (tiles,), tensors, numbers, constants, WARPS)
        return step, g

    def backward(
        self, call: StepsCall, dstep: Tensor, dg: Tensor, ddt: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of dt, A and dt_bias, in their dtypes. ddt: where the first is written."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .backward import ssd_steps_bwd, ssd_steps_sums

        dt, (A, dt_bias) = call.dt, _heads(call)
        if ddt is None:
            ddt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
        dA, dbias = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=dt.device) for x in (A, dt_bias))
        tiles, constants = _shape(call)
        programs, heads, block = min(PARTS, tiles), dt.shape[2], constants["BLOCK_H"]
        parts = torch.empty(2, programs, heads, dtype=torch.float32, device=dt.device)
        with on_device_of(dt):
            if dt.numel():
                tensors = (dt, A, dt_bias, dstep.contiguous(), dg.contiguous(), ddt, parts)
                numbers = (dt.shape[0] * dt.shape[1], *dt.shape[1:], *dt.stride(), *ddt.stride())
                launch(ssd_steps_bwd, (programs,), tensors, numbers, constants, WARPS)
            # the sum of no parts is 0
            constants = {"BLOCK_H": block, "ROWS": max(1, SUMMED // block)}
            launch(ssd_steps_sums, (2,), (parts, dA, dbias), (programs, heads), constants, WARPS)
        return ddt, dA, dbias


def _heads(call: StepsCall) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.contiguous() for x in (call.A, call.dt_bias))


def _shape(call: StepsCall) -> tuple[int, dict[str, Any]]:
    """Return the tiles of tokens, and constants."""
    batch, length, heads = call.dt.shape
    block = 1 << (heads - 1).bit_length()
    tokens = max(1, TILE // block)
    constants = {"SOFTPLUS": call.softplus, "LOG": call.log, "TOKENS": tokens, "BLOCK_H": block}
    return -(-batch * length // tokens), constants
