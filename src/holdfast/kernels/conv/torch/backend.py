"""The short convolution in PyTorch: a product for each tap, in float32 (float64 for float64 inputs)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.varlen import sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.delta_rule import l2_normalize
from holdfast.recurrences.packing import packed_beside

from ..call import ConvCall, Gradient


class PyTorchConv:
    """Every call, on every device that PyTorch has."""

    name = "pytorch"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def forward(
        self, plan: Plan, call: ConvCall, cu_seqlens: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D] in x's dtype and, where final asks for it, the last inputs [N, W - 1, D] in float32 or wider."""
        if cu_seqlens is not None:
            sequence_bounds(cu_seqlens, call.x.shape[1])
        y, last = convolve(call, cu_seqlens)
        return y, last if final else None

    def backward(
        self,
        plan: Plan,
        call: ConvCall,
        cu_seqlens: Tensor | None,
        grad_y: Gradient,
        grad_final: Tensor | None,
        into: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Gradients of x, weight, bias and initial_state, None where the input is. into: where that of x will be."""
        if isinstance(grad_y, tuple):
            grad_y = torch.cat([x.flatten(2) for x in grad_y], -1)
        given = {name: x for name, x in zip(call._fields[:4], call[:4], strict=True) if x is not None}

        def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            return convolve(call._replace(**dict(zip(given, leaves, strict=True))), cu_seqlens)

        grads = dict(zip(given, vjp(run, list(given.values()), [grad_y, grad_final]), strict=True))
        if into is not None:
            grads["x"] = into.copy_(grads["x"])
        return [grads.get(name) for name in call._fields[:4]]


def convolve(call: ConvCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, the last inputs of each sequence), differentiable. Offsets have been checked."""
    before = call.weight.shape[1] - 1
    sequences = call.x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x = call.x.to(torch.promote_types(call.x.dtype, torch.float32))
    tail = call.initial_state
    if tail is None:
        tail = x.new_zeros(sequences, before, x.shape[2])
    if cu_seqlens is None:
        rows = torch.cat([tail, x], 1)
        # a copy: a view would keep all of the rows alive
        return _activated(call, _taps(call, rows)), rows[:, x.shape[1] :].clone()
    return _packed(call, x, tail, cu_seqlens)


def _packed(call: ConvCall, x: Tensor, tail: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    # every sequence is laid behind its own tail in one long row
    length, (sequences, before, channels) = x.shape[1], tail.shape
    numbers = torch.arange(sequences, dtype=torch.int64, device=x.device)
    cu_seqlens, sequence = packed_beside(x, cu_seqlens)
    out = torch.arange(length, dtype=torch.int64, device=x.device) + sequence * before
    offsets = torch.arange(before, dtype=torch.int64, device=x.device)

    def beside(bounds: Tensor) -> Tensor:
        return ((bounds + numbers * before)[:, None] + offsets).flatten()

    row = x.new_zeros(length + sequences * before, channels).index_copy(0, beside(cu_seqlens[:-1]), tail.flatten(0, 1))
    row = row.index_copy(0, out + before, x[0])
    last = row[beside(cu_seqlens[1:])].unflatten(0, (sequences, before))
    # what lies between two sequences is dropped before the activation, whose gradient there is NaN if one of them is
    return _activated(call, _taps(call, row[None])[:, out]), last


def _taps(call: ConvCall, rows: Tensor) -> Tensor:
    """[B, T + W - 1, D] -> [B, T, D], before the activation."""
    width = call.weight.shape[1]
    length = rows.shape[1] - width + 1
    weight = call.weight.to(rows.dtype)
    y = rows.new_zeros(()) if call.bias is None else call.bias.to(rows.dtype)
    for j in range(width):
        y = torch.addcmul(y, rows[:, j : j + length], weight[:, j])
    return y


def _activated(call: ConvCall, y: Tensor) -> Tensor:
    """In x's dtype."""
    y = F.silu(y) if call.activation == "silu" else y
    if call.heads:
        heads, rest = y.tensor_split([call.heads * call.head_dim], -1)
        y = torch.cat([l2_normalize(heads.unflatten(-1, (call.heads, call.head_dim))).flatten(-2), rest], -1)
    return y.to(call.x.dtype)
