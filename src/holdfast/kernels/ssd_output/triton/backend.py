"""Skip, gate and norm as Triton kernels: each tensor is read once and written once, in float32 inside."""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe

from ..call import OutputCall
from ..torch.backend import Gradients

# channels of a row whose norm one block takes
WIDEST = 8192
# channels of a block without a norm
NARROW = 1024
# elements a thread, of each tensor
HELD = {"forward": 16, "backward": 8}
# threads of the backward pass that an SM has registers for, with a norm and without; on a device without SMs, programs
THREADS, PLAIN_THREADS, ELSEWHERE = 512, 896, 8
# elements of a tile of the sums
SUMMED, WARPS = 4096, 4


class TritonOutput:
    """Calls in at most 32 bits on an NVIDIA GPU from Ampere on; the backward pass keeps nothing beside the inputs."""

    def reject(self, call: OutputCall) -> str | None:
        """Why the kernels cannot serve a call, in words, or None."""
        if call.weight is not None and call.weight.shape[1] > WIDEST:
            return f"its norm is over {WIDEST} channels at most; got {call.weight.shape[1]}"
        return None

    def forward(self, call: OutputCall) -> Tensor:
        """Return y [B, T, H, P], contiguous, in o's dtype."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .forward import ssd_output_fwd

        run = _Run(call, "forward", None if call.D is None else call.x, call.z)
        y = torch.empty(call.o.shape, dtype=call.o.dtype, device=call.o.device)
        if y.numel():
            tensors = (call.o.contiguous(), *run.tensors[:1], run.D, *run.tensors[1:], run.weight, y)
            numbers = (*run.sizes, call.eps, *run.strides)
            with on_device_of(y):
                launch(ssd_output_fwd, (run.tiles * run.blocks,), tensors, numbers, run.constants, run.warps)
        return y

    def backward(self, call: OutputCall, dy: Tensor, dz: Tensor | None = None) -> Gradients:
        """Return the gradients of o, D, z and weight, None where the input is.

        dz: where that of z is written, of dense rows.
        """
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .backward import ssd_output_bwd, ssd_output_sums

        o, given = call.o.contiguous(), (call.D, call.weight)
        do = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        dD, dweight = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=o.device) for x in given)
        if dz is None and call.z is not None:
            dz = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        if not do.numel():
            for x in (dD, dweight):
                if x is not None:
                    x.zero_()
            return do, dD, dz, dweight
        run = _Run(call, "backward", None if call.D is None else call.x, call.z, dy, dz)
        x, z, gradient, to = run.tensors
        programs = run.programs(describe(o.device).sms)
        sums = sum(x is not None for x in given)
        parts = torch.empty(programs, sums, run.sizes[2], dtype=torch.float32, device=o.device) if sums else None
        tensors = (o, x, run.D, z, run.weight, gradient, do, to, parts)
        with on_device_of(do):
            numbers = (*run.sizes, call.eps, *run.strides)
            launch(ssd_output_bwd, (programs * run.blocks,), tensors, numbers, run.constants, run.warps)
            if parts is not None:
                heads, constants = o.shape[2], run.of_sums()
                numbers = (programs, run.sizes[2])
                launch(ssd_output_sums, (heads, sums), (parts, dD, dweight), numbers, constants, WARPS)
        return do, dD, dz, dweight

    def add_skip(self, dx: Tensor, do: Tensor, D: Tensor, into: Tensor) -> None:
        """Write into = dx + D do, x's whole gradient; all but D [B, T, H, P]. into, of dense rows, may be dx."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .backward import ssd_output_add_skip

        run = _Run(OutputCall(dx, dx, D), "forward", into)
        if dx.numel():
            tensors = (dx.contiguous(), do.contiguous(), run.D, into)
            numbers = (*run.sizes, *run.strides)
            with on_device_of(dx):
                launch(ssd_output_add_skip, (run.tiles * run.blocks,), tensors, numbers, run.constants, run.warps)


def _rows(x: Tensor) -> Tensor:
    """Return x [B, T, H, P] with a token's channels side by side."""
    return x if x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) else x.contiguous()


class _Run:
    """A call as the kernels take it, and tensors [B, T, H, P] in any memory, with the strides of batch and tokens."""

    def __init__(self, call: OutputCall, direction: str, *strided: Tensor | None) -> None:
        batch, length, heads, self.width = call.o.shape
        channels = heads * self.width
        self.D, self.weight = (None if x is None else x.contiguous() for x in (call.D, call.weight))
        self.tensors = tuple(None if x is None else _rows(x) for x in strided)
        self.sizes = (batch * length, length, channels)
        strides = tuple(s for x in self.tensors for s in ((0, 0) if x is None else x.stride()[:2]))
        unit = gcd(16, *strides)
        self.strides = tuple(s // unit for s in strides)
        across = min(channels, NARROW) if call.weight is None else call.weight.shape[1]
        block = 1 << (across - 1).bit_length()
        held = HELD[direction]
        self.warps = max(4, min(16, block // (32 * held)))
        rows = max(1, 32 * self.warps * held // block)
        self.blocks, self.tiles = -(-channels // across), -(-batch * length // rows)
        self.per_channel = call.D is not None and call.D.dim() == 2
        self.constants: dict[str, Any] = {
            "P": self.width,
            "PER_CHANNEL": self.per_channel,
            "WIDTH": across,
            "BLOCK": block,
            "ROWS": rows,
            "UNIT": unit,
        }

    def programs(self, sms: int | None) -> int:
        """Return the programs of a block of channels: as many as a device holds at a time, at most one a tile."""
        threads = PLAIN_THREADS if self.weight is None else THREADS
        together = threads // (32 * self.warps) * sms if sms else ELSEWHERE
        return max(1, min(self.tiles, together // self.blocks))

    def of_sums(self) -> dict[str, Any]:
        """Return the constants of the kernel that adds up what programs have summed."""
        block = 1 << (self.width - 1).bit_length()
        return {"P": self.width, "PER_CHANNEL": self.per_channel, "BLOCK": block, "ROWS": max(1, SUMMED // block)}
