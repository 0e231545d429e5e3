"""Outputs inside chunks as Triton kernels, scores in registers alone.

The device code is in forward.py, backward_tiled.py and backward_single_tile.py.
"""

import torch
from torch import Tensor

from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.chunk.intra import triton as model
from holdfast.planner.models.chunk.intra import triton_backward as gradients_model

TENSORS = ("q", "k", "v", "g", "states", "gate")


class TritonIntraChunk:
    """Chunks of 16 to 512 steps, K and V of 16 to 256, on NVIDIA GPUs from Ampere on.

    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32.
    Forward one launch; backward one, and for chunks of several tiles one more for the decays.
    """

    name = "triton"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        low, high = model.CHUNKS
        if not low <= problem["C"] <= high:
            return f"it takes chunks of {low} to {high} steps; got {problem['C']}"
        low, high = model.WIDTHS
        for name in "KV":
            if not low <= problem[name] <= high:
                return f"it takes {name} of {low} to {high}; got {problem[name]}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (model if direction == "forward" else gradients_model).candidates(problem, device)

    def forward(self, plan: Plan, call: IntraChunkCall) -> Tensor:
        """Return o [B, T, H, V] in v's dtype."""
        with torch.cuda.device_of(call.v):
            o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
            _Run(plan, call).forward(o)
            return o

    def backward(self, plan: Plan, call: IntraChunkCall, grad_o: Tensor) -> list[Tensor | None]:
        """Return the gradients of q, k, v, g, states and gate, None where the input is."""
        with torch.cuda.device_of(call.v):
            return _Run(plan, call).backward(grad_o)


def _covering(size: int) -> int:
    """Return the power of two, at least 16, that covers size: what a tile of tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


def sum_decay_grad(row_sums: Tensor, column_sums: Tensor, dg: Tensor, chunk: int) -> None:
    """Fill dg [B, T, H] from sums of rows and of columns, in float32: see `intra_chunk_decay_grad`."""
    from holdfast.kernels.runtime.launch import launch_by_triton

    from .backward_tiled import intra_chunk_decay_grad

    batch, length, heads = row_sums.shape
    chunks, block = -(-length // chunk), min(16, _covering(heads))
    with torch.cuda.device_of(row_sums):
        how, grid = {"BLOCK_C": _covering(chunk), "BLOCK_H": block}, (-(-heads // block) * chunks * batch,)
        launch_by_triton(intra_chunk_decay_grad, grid, row_sums, column_sums, dg, length, chunk, chunks, heads, **how)


class _Run:
    def __init__(self, plan: Plan, call: IntraChunkCall) -> None:
        self.plan = plan
        self.call = call._replace(
            **{name: x.contiguous() for name in TENSORS if (x := getattr(call, name)) is not None}
        )
        self.batch, self.length, self.heads, self.values = call.v.shape
        self.groups, self.keys = call.k.shape[2:]
        self.chunk = call.chunk_size
        self.chunks = -(-self.length // self.chunk)
        self.sizes = (self.length, self.chunk, self.chunks, self.heads, self.groups, self.keys, self.values)
        # one TF32 product would lose half of float32's digits
        self.precision = "tf32x3" if call.v.dtype == torch.float32 else "tf32"
        self.how = {"PRECISION": self.precision, "BLOCK": plan["block"], "num_warps": plan["warps"]}
        self.tiles = -(-self.chunk // plan["block"])

    def _grid(self, tiles: int) -> tuple[int]:
        return (tiles * self.chunks * self.batch * self.heads,)

    def forward(self, o: Tensor) -> None:
        """Fill o, in any dtype."""
        from holdfast.kernels.runtime.launch import launch_by_triton

        from . import forward as kernels

        call, plan = self.call, self.plan
        if not o.numel():
            return
        launch_by_triton(
            kernels.intra_chunk_fwd,
            self._grid(self.tiles * -(-self.values // plan["columns"])),
            *(getattr(call, name) for name in TENSORS),
            o,
            call.scale,
            *self.sizes,
            SIGMOID=call.gate_activation == "sigmoid",
            BLOCK_K=_covering(self.keys),
            BLOCK_N=plan["columns"],
            STAGES=plan["stages"],
            maxnreg=model.most_registers(plan["block"], plan["columns"], self.keys, plan["warps"]),
            **self.how,
        )

    def backward(self, grad_o: Tensor) -> list[Tensor | None]:
        from holdfast.kernels.runtime.launch import launch_by_triton

        call, plan = self.call, self.plan
        grads = [None if (x := getattr(call, name)) is None else torch.empty_like(x) for name in TENSORS]
        if not call.v.numel():
            return grads
        dq, dk, dv, dg, dstates, dgate = grads
        given = (*(getattr(call, name) for name in TENSORS), grad_o.contiguous())
        blocks = {"BLOCK_K": _covering(self.keys), "BLOCK_V": _covering(self.values)}
        # a query head's value heads: Triton compiles in a 1
        sizes = (*self.sizes[:4], self.heads // self.groups, self.keys, self.values)
        how = self.how | blocks | {"SIGMOID": call.gate_activation == "sigmoid"}
        if gradients_model.is_single_tile(plan["block"], plan["columns"], self.chunk, self.keys, self.values):
            from . import backward_single_tile as kernels

            blocks = self.chunks * self.batch * self.groups
            launch_by_triton(kernels.intra_chunk_bwd_single_tile, (blocks,), *given, *grads, call.scale, *sizes, **how)
            return grads
        from . import backward_tiled as kernels

        row_sums, column_sums = (
            None if call.g is None else torch.empty(call.g.shape, dtype=torch.float32, device=call.g.device)
            for _ in range(2)
        )
        across = [-(-size // plan["columns"]) for size in (self.keys, self.values)]
        programs = 2 * self.tiles + (0 if call.states is None else across[0] * across[1])
        launch_by_triton(
            kernels.intra_chunk_bwd,
            (programs * self.chunks * self.batch * self.groups,),
            *given,
            *(dq, dk, dv, dstates, dgate, row_sums, column_sums, call.scale),
            *sizes,
            BLOCK_N=plan["columns"],
            STAGES=plan["stages"],
            **how,
        )
        if call.g is not None:
            sum_decay_grad(row_sums, column_sums, dg, self.chunk)
        return grads
