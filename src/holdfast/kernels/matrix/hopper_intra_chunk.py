"""Outputs inside chunks on Hopper, copied by TMA; see hopper_intra_chunk_forward.py. Backward it is the Triton one."""

import torch
from torch import Tensor

from holdfast.kernels.common.gluon_support import refusal, without_gluon
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import intra_chunk_hopper as model

from .intra_chunk import IntraChunkCall
from .triton_intra_chunk import TritonIntraChunk


class HopperIntraChunk(TritonIntraChunk):
    """Chunks of 64 to 512 steps, K and V of 64 or 128, bfloat16 and float16, on NVIDIA's Hopper."""

    name = "hopper"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["C"] not in model.CHUNKS:
            return f"it takes chunks of {', '.join(map(str, model.CHUNKS))} steps; got {problem['C']}"
        for name in "KV":
            if problem[name] not in model.WIDTHS:
                return f"it takes {name} of {' or '.join(map(str, model.WIDTHS))}; got {problem[name]}"
        return without_gluon() or super().reject(problem, device)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: IntraChunkCall) -> Tensor:
        with torch.cuda.device_of(call.v):
            o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
            if o.numel():
                _forward(call, o, plan["stages"])
            return o


def _forward(call: IntraChunkCall, o: Tensor, stages: int) -> None:
    from holdfast.kernels.common.gluon import gl
    from holdfast.kernels.common.gluon_launch import aligned, tiles

    from . import hopper_intra_chunk_forward as kernels

    batch, length, heads, _ = o.shape
    groups, keys = call.k.shape[2:]
    chunks = -(-length // call.chunk_size)

    def tiled(x: Tensor | None) -> object:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        return None if x is None else tiles(aligned(x), [1, model.TILE, 1, x.shape[3]], layout)

    states = None
    if call.states is not None:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        whole = aligned(call.states.to(o.dtype)).view(-1, keys, o.shape[3])
        states = tiles(whole, [1, *whole.shape[1:]], layout)
    g = None if call.g is None else call.g.contiguous()
    inputs = (tiled(call.q), tiled(call.k), tiled(call.v), states, tiled(call.gate), tiled(o), g, call.scale)
    sizes = (length, call.chunk_size, chunks, heads, groups)
    grid = (call.chunk_size // model.TILE * chunks * batch * heads,)
    kernels.forward[grid](*inputs, *sizes, call.gate_activation == "sigmoid", stages, num_warps=4)
