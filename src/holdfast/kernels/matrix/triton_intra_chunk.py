"""Outputs inside chunks as Triton kernels, scores in registers alone.

The device code is in triton_intra_chunk_forward.py and triton_intra_chunk_backward.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.common.pullback import pull_back
from holdfast.kernels.common.triton_support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import intra_chunk as model

from . import decay
from .intra_chunk import IntraChunkCall

_TENSORS = ("q", "k", "v", "g", "states", "gate")


class TritonIntraChunk:
    """Chunks of 16 to 512 steps, K and V of 16 to 256, on NVIDIA GPUs from Ampere on.

    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32.
    Forward one launch; backward one each for queries, for keys and values, for states, and one more with a gate.
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
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: IntraChunkCall) -> Tensor:
        """o [B, T, H, V] in v's dtype."""
        with torch.cuda.device_of(call.v):
            o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
            _Run(plan, call).forward(o)
            return o

    def backward(self, plan: Plan, call: IntraChunkCall, grad_o: Tensor) -> list[Tensor | None]:
        """Gradients of q, k, v, g, states and gate, None where the input is."""
        with torch.cuda.device_of(call.v):
            return _Run(plan, call).backward(grad_o)


def _covering(size: int) -> int:
    """The power of two, at least 16, that covers size: what a tile of tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


class _Run:
    def __init__(self, plan: Plan, call: IntraChunkCall) -> None:
        self.plan = plan
        self.call = call._replace(
            **{name: x.contiguous() for name in _TENSORS if (x := getattr(call, name)) is not None}
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
        """Fills o, in any dtype."""
        from . import triton_intra_chunk_forward as kernels

        call, plan = self.call, self.plan
        if not o.numel():
            return
        kernels.forward[self._grid(self.tiles * -(-self.values // plan["columns"]))](
            *(getattr(call, name) for name in _TENSORS),
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
        call = self.call
        if not call.v.numel():
            return [None if (x := getattr(call, name)) is None else torch.empty_like(x) for name in _TENSORS]
        grad_o, grad_gate = self._through_gate(grad_o.contiguous())
        high, low = self._sums()
        grad_q, rows = self._queries(grad_o, high, low)
        grad_k, grad_v, columns = self._keys_and_values(grad_o, high, low)
        grad_g = None if call.g is None else self._decays(rows - columns)
        grad_states = None if call.states is None else self._states(grad_o, high, low)
        return [self._of_groups(grad_q), self._of_groups(grad_k), grad_v, grad_g, grad_states, grad_gate]

    def _through_gate(self, grad_o: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of the output before the gate, and that of the gate."""
        call = self.call
        if call.gate is None:
            return grad_o, None
        before = torch.empty(call.v.shape, dtype=torch.float32, device=call.v.device)
        _Run(self.plan, call._replace(gate=None)).forward(before)

        def gated(o: Tensor, gate: Tensor) -> tuple[Tensor]:
            wide = gate.float()
            return (o * (F.silu(wide) if call.gate_activation == "silu" else wide.sigmoid()),)

        grad_before, grad_gate = pull_back(gated, [before, call.gate], [grad_o])
        return grad_before.to(grad_o.dtype), grad_gate

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Base-2 log decays summed from each chunk's start, [B, T, H], as high and low float32."""
        call = self.call
        if call.g is None:
            zeros = torch.zeros(call.v.shape[:3], dtype=torch.float32, device=call.v.device)
            return zeros, zeros
        total = self._chunked(decay.clamp_log(call.g.double()) * 1.4426950408889634).cumsum(2)
        total = total.flatten(1, 2)[:, : self.length]
        high = total.float()
        return high, (total - high).float()

    def _chunked(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, chunks, chunk, H], the tail filled with zeros."""
        return F.pad(x, (0, 0, 0, -self.length % self.chunk)).unflatten(1, (-1, self.chunk))

    def _decays(self, change: Tensor) -> Tensor:
        """The gradient of g from what each step's sum of log decays gets: sums from the chunk's end."""
        total = self._chunked(change.double()).flip(2).cumsum(2).flip(2)
        return total.flatten(1, 2)[:, : self.length].to(self.call.g.dtype)

    def _of_groups(self, grad: Tensor) -> Tensor:
        """The gradient of a query head from those of its value heads."""
        if self.groups == self.heads:
            return grad
        return grad.unflatten(2, (self.groups, -1)).sum(3).to(self.call.q.dtype)

    def _per_head(self) -> Tensor:
        dtype = self.call.q.dtype if self.groups == self.heads else torch.float32
        return torch.empty(self.batch, self.length, self.heads, self.keys, dtype=dtype, device=self.call.q.device)

    def _per_step(self) -> Tensor:
        return torch.empty(self.call.v.shape[:3], dtype=torch.float32, device=self.call.v.device)

    def _queries(self, grad_o: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        from . import triton_intra_chunk_backward as kernels

        call, grad_q, rows = self.call, self._per_head(), self._per_step()
        tensors = (call.q, call.k, call.v, high, low, call.states, grad_o, grad_q, rows)
        blocks = {"BLOCK_K": _covering(self.keys), "BLOCK_V": _covering(self.values), "BLOCK_N": self.plan["columns"]}
        kernels.queries[self._grid(self.tiles)](*tensors, call.scale, *self.sizes, **blocks, **self.how)
        return grad_q, rows

    def _keys_and_values(self, grad_o: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from . import triton_intra_chunk_backward as kernels

        call, grad_k, grad_v, columns = self.call, self._per_head(), torch.empty_like(self.call.v), self._per_step()
        tensors: tuple[Any, ...] = (call.q, call.k, call.v, high, low, grad_o, grad_k, grad_v, columns)
        blocks = {"BLOCK_K": _covering(self.keys), "BLOCK_V": _covering(self.values)}
        kernels.keys_and_values[self._grid(self.tiles)](*tensors, call.scale, *self.sizes, **blocks, **self.how)
        return grad_k, grad_v, columns

    def _states(self, grad_o: Tensor, high: Tensor, low: Tensor) -> Tensor:
        from . import triton_intra_chunk_backward as kernels

        call, grad_states, width = self.call, torch.empty_like(self.call.states), self.plan["columns"]
        tiles = -(-self.keys // width) * -(-self.values // width)
        tensors = (call.q, high, low, grad_o, grad_states)
        kernels.entering_states[self._grid(tiles)](*tensors, call.scale, *self.sizes, BLOCK_N=width, **self.how)
        return grad_states
