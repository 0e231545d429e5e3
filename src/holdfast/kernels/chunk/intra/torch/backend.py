"""Outputs inside chunks in PyTorch, on any device: two masked matrix products a chunk, a few chunks at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.lib.torch import chunks, decay
from holdfast.planner import Candidate, Device, Direction, Plan, Problem

_TOKENWISE = ("q", "k", "v", "g", "gate")
_TENSORS = ("q", "k", "v", "g", "states", "gate")


class ChunkedIntraChunk:
    """Every call, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name, (("chunks", max(1, 1024 // problem["C"])),))),)

    def forward(self, plan: Plan, call: IntraChunkCall) -> Tensor:
        """Return o [B, T, H, V] in v's dtype."""
        out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        for piece, steps, _ in _pieces(call, plan["chunks"]):
            out[:, steps] = _run(piece)
        return out

    def backward(self, plan: Plan, call: IntraChunkCall, grad_o: Tensor) -> list[Tensor | None]:
        """Return the gradients of q, k, v, g, states and gate, None where the input is."""
        grads = {
            name: torch.empty_like(x, memory_format=torch.contiguous_format)
            for name in _TENSORS
            if (x := getattr(call, name)) is not None
        }
        for piece, steps, group in _pieces(call, plan["chunks"]):

            def run(*leaves: Tensor, piece: IntraChunkCall = piece) -> tuple[Tensor]:
                return (_run(piece._replace(**dict(zip(grads, leaves, strict=True)))),)

            found = vjp(run, [getattr(piece, name) for name in grads], [grad_o[:, steps]])
            for name, grad in zip(grads, found, strict=True):
                grads[name][:, group if name == "states" else steps] = grad
        return [grads.get(name) for name in _TENSORS]


def _pieces(call: IntraChunkCall, count: int) -> list[tuple[IntraChunkCall, slice, slice]]:
    """Cut the call into pieces of `count` chunks; return each with its steps and its chunks."""
    length, pieces = call.v.shape[1], []
    for start in range(0, length, count * call.chunk_size):
        steps = slice(start, min(start + count * call.chunk_size, length))
        group = slice(start // call.chunk_size, start // call.chunk_size + count)
        cut = {name: x[:, steps] for name in _TOKENWISE if (x := getattr(call, name)) is not None}
        if call.states is not None:
            cut["states"] = call.states[:, group]
        pieces.append((call._replace(**cut), steps, group))
    return pieces


def _run(call: IntraChunkCall) -> Tensor:
    dtype, size = torch.promote_types(call.v.dtype, torch.float32), call.chunk_size
    length, heads = call.v.shape[1:3]
    q, k = (chunks.cut_heads(x.to(dtype), heads, size) for x in (call.q, call.k))
    v = chunks.cut(call.v.to(dtype), size)
    if call.g is None:
        g = v.new_zeros(1, 1, *v.shape[2:4])
    else:
        g = decay.clamp_log(chunks.cut(call.g.to(dtype), size))
    o = ((q @ k.mT) * decay.between(g)) @ v
    if call.states is not None:
        o = o + (q * decay.to_here(g[..., None])) @ call.states.to(dtype).movedim(1, 2)
    o = chunks.join(call.scale * o, length)
    if call.gate is not None:
        gate = call.gate.to(dtype)
        o = o * (F.silu(gate) if call.gate_activation == "silu" else gate.sigmoid())
    return o
