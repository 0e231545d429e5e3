"""The step of a layer as Triton kernels: one launch by head and block of V up to the state, one for norm and gate."""

import math
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.layer_step import triton as model
from holdfast.recurrences.delta_rule import L2_EPS

from ..call import ConvStep, LayerStep, MLSTMStep, RetentionStep, RGLRUStep

# channels that a warp shifts in a tail: all of its threads have their own
SHIFTED = 256
# channels of a program of RGLRUStep
CHANNELS, CHANNEL_WARPS = 128, 4


class TritonLayerStep:
    """float32 inside; each cell of a state is read once and written once, in place."""

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        for name, most in model.MOST.items():
            if problem[name] > most:
                return f"{name} is at most {most}; got {problem[name]}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def run(self, plan: Plan, call: LayerStep) -> Tensor:
        """y [B, 1, N] in the dtype of the call's first tensor; the call's states are updated."""
        from holdfast.kernels.runtime.launch import on_device_of

        run = {ConvStep: _conv, RetentionStep: _retention, MLSTMStep: _mlstm, RGLRUStep: _rglru}[type(call)]
        with on_device_of(call[0]):
            return run(plan, call)


def _dense(x: Tensor | None) -> Tensor | None:
    """x [B, 1, N] with channels side by side."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _row(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _warps(width: int) -> int:
    """Of a program that holds a row of the norm."""
    return min(16, max(1, width // 256))


def _tile(plan: Plan, keys: int, values: int) -> dict[str, int]:
    return {"K": keys, "V": values, "BLOCK_K": _power(keys), "BLOCK_V": plan["columns"]}


def _power(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _conv(plan: Plan, call: ConvStep) -> Tensor:
    from holdfast.kernels.runtime.launch import has_pdl, launch

    from .token import conv_token

    batch, heads, keys, values = call.state.shape
    o = torch.empty((batch, heads * values), dtype=torch.float32, device=call.x.device)
    x, a, beta, gate = (_dense(x) for x in (call.x, call.a, call.beta, call.gate))
    vectors = [_plain(x) for x in (call.conv_weight, call.conv_bias, call.A_log, call.dt_bias, call.D)]
    weight, bias, A_log, dt_bias, D = vectors
    if batch:
        tensors = (x, call.tail, call.state, weight, bias, a, beta, A_log, dt_bias, D, None if call.delta else gate, o)
        numbers = (
            heads, *call.state.stride()[:3], _row(x), *call.tail.stride(), _row(a), _row(beta), _row(gate),
            call.largest, L2_EPS, keys**-0.5 if call.delta else 1.0,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "PDL": has_pdl(x.device),
            "DELTA": call.delta,
            "GROUP": heads // call.heads,
            "W": call.conv_weight.shape[1],
            "L": call.tail.shape[1],
        } | _tile(plan, keys, values)
        launch(conv_token, _programs(plan, call.state), tensors, numbers, constants, plan["warps"])
    return _finished(o, call, gate if call.delta else None, x)


def _programs(plan: Plan, state: Tensor) -> tuple[int]:
    return (state.shape[0] * state.shape[1] * -(-state.shape[3] // plan["columns"]),)


def _finished(o: Tensor, call: ConvStep | RetentionStep, gate: Tensor | None, x: Tensor) -> Tensor:
    """y [B, 1, N]: o [B, N] normed and gated; a tail is shifted, a position counted on."""
    from holdfast.kernels.runtime.launch import has_pdl, launch

    from .finish import rms_finish

    batch, width = o.shape
    y = torch.empty((batch, 1, width), dtype=x.dtype, device=x.device)
    if batch:
        weight = call.norm_weight.contiguous()
        norm = weight.shape[-1]
        rows, block = batch * width // norm, _power(norm)
        tail, position = getattr(call, "tail", None), getattr(call, "position", None)
        length, channels = (0, 0) if tail is None else tail.shape[1:]
        warps = _warps(block)
        blocks = rows + (-(-channels // (SHIFTED * warps)) * batch if length else 0)
        tensors = (o, gate, weight, y, x, tail, position)
        strides = (0, 0, 0) if tail is None else tail.stride()
        numbers = (rows, width // norm, call.norm_eps, _row(gate), channels, _row(x), *strides)
        pdl = has_pdl(x.device)
        constants = {"PDL": pdl, "N": norm, "BLOCK_N": block, "SHARED": weight.dim() == 1}
        constants |= {"L": length, "BLOCK": SHIFTED * warps}
        launch(rms_finish, (blocks,), tensors, numbers, constants, warps, pdl)
    return y


def _retention(plan: Plan, call: RetentionStep) -> Tensor:
    from holdfast.kernels.runtime.launch import has_pdl, launch

    from .token import retention_token

    batch, heads, keys, values = call.state.shape
    o = torch.empty((batch, heads * values), dtype=torch.float32, device=call.x.device)
    x, a, gate = (_dense(x) for x in (call.x, call.a, call.gate))
    if batch:
        tensors = (x, call.state, a, call.position, o)
        numbers = (heads, *call.state.stride()[:3], _row(x), _row(a), call.normalizer, keys**-0.5)
        # compiled in: as an argument it would be a float32
        constants = {"PDL": has_pdl(x.device), "LOG2_BASE": math.log2(call.base)} | _tile(plan, keys, values)
        launch(retention_token, _programs(plan, call.state), tensors, numbers, constants, plan["warps"])
    return _finished(o, call, gate, x)


def _mlstm(plan: Plan, call: MLSTMStep) -> Tensor:
    from holdfast.kernels.runtime.launch import has_pdl, launch

    from .finish import mlstm_finish
    from .token import mlstm_token

    batch, heads, keys, values = call.C.shape
    o = torch.empty((batch, heads * values), dtype=torch.float32, device=call.x.device)
    y = torch.empty((batch, 1, heads * values), dtype=call.x.dtype, device=call.x.device)
    if not batch:
        return y
    x, gates, gate = (_dense(x) for x in (call.x, call.gates, call.gate))
    rows, tile = (_row(call.m), _row(x), _row(gates)), _tile(plan, keys, values)
    scale, constants = keys**-0.5, {"PDL": has_pdl(x.device), "EXPONENTIAL": call.exponential}
    tensors = (x, gates, call.C, call.m, o)
    numbers = (heads, *call.C.stride()[:3], *rows, call.cap, scale)
    launch(mlstm_token, _programs(plan, call.C), tensors, numbers, constants | tile, plan["warps"])
    tensors = (o, x, gates, call.n, call.m, gate, call.norm_weight.contiguous(), y)
    numbers = (heads, *call.n.stride(), *rows, _row(gate), call.cap, scale, call.eps, call.norm_eps)
    constants |= {"NORMALIZE": call.normalize} | tile | {"BLOCK_V": _power(values)}
    warps, pdl = _warps(_power(max(keys, values))), has_pdl(x.device)
    launch(mlstm_finish, (batch * heads,), tensors, numbers, constants, warps, pdl)
    return y


def _rglru(plan: Plan, call: RGLRUStep) -> Tensor:
    from holdfast.kernels.runtime.launch import launch

    from .token import rglru_token

    batch, channels = call.h.shape
    y = torch.empty((batch, 1, channels), dtype=call.u.dtype, device=call.u.device)
    if batch:
        u, z, gates = _dense(call.u), _dense(call.z), call.gates.contiguous()
        tensors = (u, z, gates, call.h, call.rate.contiguous(), y)
        numbers = (channels, _row(call.h), _row(u), _row(z), _row(gates), call.decay_scale)
        constants = {"HEAD": channels // gates.shape[2], "BLOCK": CHANNELS}
        launch(rglru_token, (-(-channels // CHANNELS) * batch,), tensors, numbers, constants, CHANNEL_WARPS)
    return y
