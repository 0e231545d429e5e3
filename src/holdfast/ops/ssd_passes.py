"""Both passes of Mamba-2's scan with what stands around it: step sizes before it, skip, gate and norm behind it.

Two custom ops run them: that of `ssd`, and that of nn.Mamba2 with its convolution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.ssd_output.call import OutputCall
from holdfast.kernels.ssd_output.torch.backend import PyTorchOutput
from holdfast.kernels.ssd_output.triton.backend import TritonOutput
from holdfast.kernels.ssd_steps.call import StepsCall
from holdfast.kernels.ssd_steps.torch.backend import PyTorchSteps
from holdfast.kernels.ssd_steps.triton.backend import TritonSteps
from holdfast.recurrences.definition import MatrixCall

from .autocast import without_autocast
from .matrix import matrix_backward, matrix_forward
from .mlstm_gates import can_fuse


class SSDCall(NamedTuple):
    """y = output(scan(x, steps(dt, A), B, C)), of the two calls beside the scan."""

    x: Tensor  # [B, T, H, P]
    B: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    steps: StepsCall
    D: Tensor | None = None  # [H] or [H, P]
    z: Tensor | None = None  # [B, T, H, P]
    weight: Tensor | None = None  # of the norm, a row a group
    eps: float = 0.0
    initial_state: Tensor | None = None  # [sequences, H, N, P]

    def output(self, o: Tensor) -> OutputCall:
        return OutputCall(o, self.x, self.D, self.z, self.weight, self.eps)


class Kept(NamedTuple):
    """What the forward pass leaves to the backward pass; each [0] where it does not."""

    o: Tensor  # [B, T, H, P], the scan's output, unless it is y
    step: Tensor  # [B, T, H]
    g: Tensor  # [B, T, H]


class Room(NamedTuple):
    """Where gradients of x, z and dt are written, a token's channels side by side; None for memory of their own.

    That of x is of a call with D.
    """

    x: Tensor | None = None
    z: Tensor | None = None
    dt: Tensor | None = None


class Gradients(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    weight: Tensor | None
    initial_state: Tensor | None


def run_forward(call: SSDCall, cu_seqlens: Tensor | None, grad: bool, backend: str) -> tuple[Tensor, Tensor, Kept]:
    """y [B, T, H, P] in x's dtype, the final state [sequences, H, N, P] in float32 or wider, and what is kept.

    grad: whether a backward pass may follow. backend: of the scan, by name, or "".
    """
    with without_autocast(call.x):
        step, g = _steps_of(call.steps).forward(call.steps)
        o, final, _ = matrix_forward(*_scanned(call, step, g), cu_seqlens, "ssd", grad, backend)
        output = call.output(o)
        y = o if output.is_o else _output_of(output).forward(output)
    if not grad:
        step, g = step.new_empty(0), g.new_empty(0)
    return y, final, Kept(o if grad and not output.is_o else o.new_empty(0), step, g)


def run_backward(
    call: SSDCall,
    kept: Kept,
    dy: Tensor | None,
    dfinal: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
    room: Room = Room(),  # noqa: B008
) -> Gradients:
    """Gradients of a call's tensors, None where it has none; dy, dfinal: of what run_forward returned, None for 0."""
    with without_autocast(call.x):
        output = call.output(kept.o)
        do, dD, dz, dweight = dy, None, None, None
        if not output.is_o:
            dy = torch.zeros_like(kept.o) if dy is None else dy
            do, dD, dz, dweight = _output_of(output).backward(output, dy, room.z)
        scanned = _scanned(call, kept.step, kept.g)
        dC, dB, dx, dg, dstep, _, dstate, _ = matrix_backward(do, dfinal, *scanned, cu_seqlens, "ssd", backend)
        if call.D is not None:
            into = dx if room.x is None else room.x
            _output_of(output).add_skip(dx, do, call.D, into)
            dx = into
        ddt, dA, dbias = _steps_of(call.steps).backward(call.steps, dstep, dg, room.dt)
    return Gradients(dx, ddt, dA, dB, dC, dD, dz, dbias, dweight, None if call.initial_state is None else dstate)


def _scanned(call: SSDCall, step: Tensor, g: Tensor) -> MatrixCall:
    """The scan as the matrix family's ops take it."""
    return MatrixCall(call.C, call.B, call.x, g, step, initial_state=call.initial_state)


def _steps_of(call: StepsCall) -> TritonSteps | PyTorchSteps:
    return TritonSteps() if can_fuse(call.dt, call.dt, call.dtype) else PyTorchSteps()


def _output_of(call: OutputCall) -> TritonOutput | PyTorchOutput:
    is_fast = can_fuse(call.o, call.o, torch.float32) and TritonOutput().reject(call) is None
    return TritonOutput() if is_fast else PyTorchOutput()
