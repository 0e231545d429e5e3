"""Outputs inside chunks and their gradients on Hopper, copied by TMA.

The device code is in forward.py, in backward_single_tile.py for gradients where one tile holds a chunk, and in
backward_tiled.py for those of longer chunks.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.chunk.intra.triton.backend import TENSORS, TritonIntraChunk, sum_decay_grad
from holdfast.kernels.lib.gluon.support import refusal, without_gluon
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.chunk.intra import hopper as model


class HopperIntraChunk(TritonIntraChunk):
    """Chunks of 64 to 512 steps, K and V of 64 or 128, bfloat16 and float16, on NVIDIA's Hopper.

    Gradients where every value head has a query head of its own; else they are Triton's.
    """

    name = "hopper"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["C"] not in model.CHUNKS:
            return f"it takes chunks of {', '.join(map(str, model.CHUNKS))} steps; got {problem['C']}"
        for name in "KV":
            if problem[name] not in model.WIDTHS:
                return f"it takes {name} of {' or '.join(map(str, model.WIDTHS))}; got {problem[name]}"
        if "mixed_states" in problem.traits:
            return f"it takes states in the inputs' dtype, {problem.dtype}; got another"
        return without_gluon() or super().reject(problem, device)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: IntraChunkCall) -> Tensor:
        o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        if o.numel():
            _forward(call, o, plan)
        return o

    def backward(self, plan: Plan, call: IntraChunkCall, grad_o: Tensor) -> list[Tensor | None]:
        if plan.backend != self.name:
            return super().backward(plan, call, grad_o)
        grads = [
            None if (x := getattr(call, name)) is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for name in TENSORS
        ]
        if call.v.numel():
            _backward(call, grad_o, grads, plan)
        return grads


def _token_tiles(x: Tensor | None, steps: int) -> Any:
    from holdfast.kernels.lib.gluon.compat import gl
    from holdfast.kernels.runtime.tma import aligned, tiles

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return None if x is None else tiles(aligned(x), [1, steps, 1, x.shape[3]], layout)


def _state_tiles(x: Tensor | None) -> Any:
    """Describe states, each in one tile."""
    from holdfast.kernels.lib.gluon.compat import gl
    from holdfast.kernels.runtime.tma import aligned, tiles

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return None if x is None else tiles(aligned(x).flatten(0, 2), [1, *x.shape[3:]], layout)


def _types(call: IntraChunkCall) -> tuple[Any, ...]:
    return (call.v.dtype, call.k.shape[3], call.v.shape[3], *(None if x is None else x.dtype for x in call[3:6]))


def _forward(call: IntraChunkCall, o: Tensor, plan: Plan) -> None:
    from holdfast.kernels.runtime.descriptor_launch import launch

    from .forward import intra_chunk_fwd_tma

    batch, length, heads, _ = o.shape
    chunk, chunks = call.chunk_size, -(-length // call.chunk_size)
    arguments = (
        *(_token_tiles(x, model.TILE) for x in (call.q, call.k, call.v)),
        *(_state_tiles(call.states), _token_tiles(call.gate, model.TILE), _token_tiles(o, model.TILE)),
        None if call.g is None else call.g.contiguous(),
        *(call.scale, length, chunks),
    )
    constants = {
        "HEADS": heads,
        "SHARED": heads // call.k.shape[2],
        "CHUNK": chunk,
        "SIGMOID": call.gate_activation == "sigmoid",
        "SLOTS": plan["slots"],
    }
    grid = (chunk // model.TILE * chunks * batch * heads, 1, 1)
    launch(intra_chunk_fwd_tma, grid, arguments, constants, 4, _types(call))


def _backward(call: IntraChunkCall, grad_o: Tensor, grads: list[Tensor | None], plan: Plan) -> None:
    batch, length, heads, _ = call.v.shape
    sizes = (call.scale, length, -(-length // call.chunk_size))
    blocks = sizes[2] * batch * heads
    if model.is_single_tile(plan):
        _backward_single_tile(call, grad_o, grads, plan, sizes, blocks)
    else:
        _backward_tiled(call, grad_o, grads, plan, sizes, blocks)


def _backward_single_tile(
    call: IntraChunkCall,
    grad_o: Tensor,
    grads: list[Tensor | None],
    plan: Plan,
    sizes: tuple[float, int, int],
    blocks: int,
) -> None:
    from holdfast.kernels.runtime.descriptor_launch import launch

    from .backward_single_tile import intra_chunk_bwd_single_tile_tma

    dq, dk, dv, dg, dstates, dgate = grads
    arguments = (
        *(_token_tiles(x, model.TILE) for x in (call.q, call.k, call.v)),
        *(_state_tiles(call.states), _token_tiles(call.gate, model.TILE), _token_tiles(grad_o, model.TILE)),
        *(_token_tiles(x, model.TILE) for x in (dq, dk, dv)),
        *(_state_tiles(dstates), _token_tiles(dgate, model.TILE)),
        *(None if call.g is None else call.g.contiguous(), dg, *sizes),
    )
    constants = {"HEADS": call.v.shape[2], "SIGMOID": call.gate_activation == "sigmoid"}
    _, _, registers = model.SINGLE_TILE[call.k.shape[3] + call.v.shape[3]]
    launch(
        intra_chunk_bwd_single_tile_tma, (blocks, 1, 1), arguments, constants, plan["warps"], _types(call), registers
    )


def _backward_tiled(
    call: IntraChunkCall,
    grad_o: Tensor,
    grads: list[Tensor | None],
    plan: Plan,
    sizes: tuple[float, int, int],
    blocks: int,
) -> None:
    from holdfast.kernels.runtime.descriptor_launch import launch

    from .backward_tiled import intra_chunk_bwd_tma

    dq, dk, dv, dg, dstates, dgate = grads
    given = (call.q, call.k, call.v, call.gate, grad_o)
    row_sums, column_sums = (
        None if call.g is None else torch.empty(call.g.shape, dtype=torch.float32, device=call.g.device)
        for _ in range(2)
    )
    arguments = (
        *(_token_tiles(x, steps) for steps in (model.TILE, model.STEPS) for x in given),
        *(_state_tiles(call.states), *(_token_tiles(x, model.TILE) for x in (dq, dk, dv, dgate))),
        *(_state_tiles(dstates), None if call.g is None else call.g.contiguous(), row_sums, column_sums, *sizes),
    )
    constants = {
        "HEADS": call.v.shape[2],
        "CHUNK": call.chunk_size,
        "SIGMOID": call.gate_activation == "sigmoid",
        "SLOTS": plan["slots"],
    }
    programs = 2 * (call.chunk_size // model.TILE) + (call.states is not None)
    registers = model.TILED_REGISTERS[call.k.shape[3] + call.v.shape[3]]
    launch(intra_chunk_bwd_tma, (programs * blocks, 1, 1), arguments, constants, 4, _types(call), registers)
    if row_sums is not None and column_sums is not None and dg is not None:
        sum_decay_grad(row_sums, column_sums, dg, call.chunk_size)
