"""The short convolution as Triton kernels: x is read once and y written once, forward; both and dx backward."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.conv.call import ConvCall, Gradient
from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.slots import Slots
from holdfast.kernels.varlen import on_device
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.conv import triton as model

REDUCED_ROWS, WARPS = 16, 4
# channels of a program that decodes
DECODED = 256


class TritonConv:
    """Up to 16 taps, float32 inside; the backward pass forms the activation's input again."""

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["W"] > model.MOST_TAPS:
            return f"it takes {model.MOST_TAPS} taps at most; got {problem['W']}"
        if problem["D"] > model.MOST_CHANNELS:
            return f"it takes {model.MOST_CHANNELS} channels at most; got {problem['D']}"
        if "heads" in problem.traits and problem["K"] > model.WIDEST_HEAD:
            return f"it normalises heads of {model.WIDEST_HEAD} channels at most; got {problem['K']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(
        self, plan: Plan, call: ConvCall, cu_seqlens: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D] in x's dtype and, where final asks for it, the last inputs [N, W - 1, D] in float32."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .forward import conv_fwd

        run = _Run(plan, call, cu_seqlens)
        y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
        last = run.state() if final else None
        if not y.numel():
            return y, None if last is None else _unchanged(last, call.initial_state)
        tensors = (run.x, run.weight, run.bias, run.initial, y, last, run.bounds)
        numbers = (*run.sizes, *_steps(run.x))
        with on_device_of(y):
            launch(conv_fwd, (run.tiles * run.across,), tensors, numbers, run.constants, plan["warps"])
        return y, last

    def backward(
        self,
        plan: Plan,
        call: ConvCall,
        cu_seqlens: Tensor | None,
        grad_y: Gradient,
        grad_final: Tensor | None,
        into: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Gradients of x, weight, bias and initial_state, None where the input is. into: where that of x will be, part
        of a wider tensor."""
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .backward import conv_bwd, conv_sums

        run, x = _Run(plan, call, cu_seqlens), call.x
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
        dweight = torch.empty(call.weight.shape, dtype=call.weight.dtype, device=x.device)
        dbias = None if call.bias is None else torch.empty(call.bias.shape, dtype=call.bias.dtype, device=x.device)
        dinitial = None if call.initial_state is None else run.state()
        if not dx.numel():
            sums = [None if of is None else of.zero_() for of in (dweight, dbias)]
            return [dx, *sums, None if dinitial is None else _unchanged(dinitial, grad_final)]
        if isinstance(grad_y, tuple):
            grads, dy_steps = tuple(part.contiguous() for part in grad_y), (0, 0)
        else:
            dy = _rows(torch.zeros_like(x) if grad_y is None else grad_y)
            grads, dy_steps = (dy, None, None), _steps(dy)
        dfinal = None if grad_final is None else grad_final.contiguous()
        width = call.weight.shape[1]
        shape = (run.tiles, width + (dbias is not None), x.shape[2])
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        tensors = (run.x, run.weight, run.bias, run.initial, *grads, dfinal, dx, dinitial, parts, run.bounds)
        numbers = (*run.sizes, *_steps(run.x), *dy_steps, *_steps(dx))
        constants = {"W": width, "BLOCK": model.REDUCED, "ROWS": REDUCED_ROWS}
        blocks = -(-x.shape[2] // model.REDUCED), shape[1]
        with on_device_of(dx):
            launch(conv_bwd, (run.tiles * run.across,), tensors, numbers, run.constants, plan["warps"])
            launch(conv_sums, blocks, (parts, dweight, dbias), (run.tiles, x.shape[2]), constants, WARPS)
        return [dx, dweight, dbias, dinitial]

    def update(self, call: ConvCall, state: Tensor, slots: Slots | None = None) -> Tensor:
        """y [B, T, D] of the tokens after those in state, which gets the last inputs instead.

        state: [B, W - 1, D]; with slots, a pool [S, W - 1, D].
        """
        from holdfast.kernels.runtime.launch import launch, on_device_of

        from .update import conv_update

        batch, length, channels = call.x.shape
        x = _dense(call.x)
        y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
        if not y.numel():
            return y
        bias = None if call.bias is None else call.bias.contiguous()
        places = (None, None, None) if slots is None else slots
        tensors = (x, call.weight.contiguous(), bias, state, y, *places)
        numbers = (length, channels, state.shape[0], *x.stride()[:2], *state.stride()[:2])
        constants = {"SILU": call.activation == "silu", "W": call.weight.shape[1], "BLOCK": DECODED}
        constants["EACH"] = slots is not None and slots.is_each
        with on_device_of(y):
            launch(conv_update, (-(-channels // DECODED) * batch,), tensors, numbers, constants, WARPS)
        return y


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _steps(x: Tensor) -> tuple[int, ...]:
    """From a row of the batch to the next, and from a token."""
    return x.stride()[:2]


def _rows(x: Tensor) -> Tensor:
    """x with channels side by side, and tokens near enough for offsets of 32 bits inside a tile."""
    return x if x.stride(2) == 1 and x.stride(1) < model.MOST_CHANNELS else x.contiguous()


def _unchanged(state: Tensor, before: Tensor | None) -> Tensor:
    """state, filled with what it was before no tokens."""
    return state.zero_() if before is None else state.copy_(before)


class _Run:
    """A call as the kernels take it. tiles: of tokens; across: blocks of channels."""

    def __init__(self, plan: Plan, call: ConvCall, cu_seqlens: Tensor | None) -> None:
        batch, length, channels = call.x.shape
        width = call.weight.shape[1]
        self.x, self.weight = _rows(call.x), call.weight.contiguous()
        self.bias, self.initial = (None if x is None else x.contiguous() for x in (call.bias, call.initial_state))
        self.bounds = on_device(cu_seqlens, length, call.x.device)
        rows = plan["segments"] * plan["steps"] * plan["chunks"]
        self.sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        packed = length // rows + self.sequences
        self.tiles = batch * -(-length // rows) if cu_seqlens is None else packed
        self.across = call.heads + -(-(channels - call.heads * call.head_dim) // plan["block"])
        self.sizes = (length, self.sequences, self.sequences.bit_length(), channels, call.heads)
        self._state = self.sequences, width - 1, channels
        self.constants: dict[str, Any] = {
            "SILU": call.activation == "silu",
            "W": width,
            "K": call.head_dim,
            "BLOCK": plan["block"],
            "SEGMENTS": plan["segments"],
            "STEPS": plan["steps"],
            "CHUNKS": plan["chunks"],
        }

    def state(self) -> Tensor:
        return torch.empty(self._state, dtype=torch.float32, device=self.x.device)
