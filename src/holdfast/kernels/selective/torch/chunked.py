"""The selective scan in vectorised PyTorch, on any device.

Time is cut into segments; of one at a time decays and writes [B, T', D, N] are formed, and a linear scan runs over its
D N channels. The backward pass sweeps forward for the state that enters each segment, then takes the segments from last
to first. From the gradient g of sum_n C_n S_n:

    dS_t = C_t g_t + a_{t+1} dS_{t+1};  d delta_t = sum_n (dS_t S_{t-1} a_t A + dS_t B_t x_t)

No division and no logarithm: a decay may be zero. Packed sequences run as a few padded batches: a step of size 0 leaves
the state as it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.lib.torch.linear_scan import scan
from holdfast.kernels.varlen import Bucket, buckets, sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import pytorch
from holdfast.recurrences.definition import SelectiveCall

from .pointwise import finish, finish_grads, step_sizes

# of a SelectiveCall's tensors, in its order
Grads = tuple[Tensor | None, ...]


class Chunked:
    """Every selective scan, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        segment, chunk = pytorch.selective_segment(problem)
        plan = Plan(self.name, (("segment", segment), ("chunk", chunk)))
        cost = pytorch.selective_chunked(problem, direction, segment, chunk)
        return (pytorch.predicted(plan, cost, problem, device, direction),)

    def forward(
        self, plan: Plan, call: SelectiveCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, T, D] in x's dtype, and the final state [sequences, D, N]; entries are left as they are."""
        run = _Run(plan, call, cu_seqlens)
        return finish(call, run.forward()), run.final

    def backward(
        self,
        plan: Plan,
        call: SelectiveCall,
        cu_seqlens: Tensor | None,
        entries: Tensor | None,
        grad_y: Tensor | None,
        grad_final: Tensor | None,
    ) -> Grads:
        """Return the gradients of the call's tensors, None for one that was not given; entries are not used."""
        run = _Run(plan, call, cu_seqlens)
        read = None if call.z is None else run.forward()
        grad = torch.zeros(call.x.shape, dtype=run.dtype, device=call.x.device)
        if grad_y is not None:
            grad += grad_y
        grad, dz = finish_grads(call, read, grad)
        run.backward(grad, grad_final)
        ddt = run.d_delta if run.softplus_grad is None else run.d_delta * run.softplus_grad
        dx, dD, dbias = run.dx, None, None
        if call.D is not None:
            dx = torch.addcmul(dx, call.D.to(run.dtype), grad)
            dD = (grad * call.x).sum((0, 1)).to(call.D.dtype)
        if call.dt_bias is not None:
            dbias = ddt.sum((0, 1)).to(call.dt_bias.dtype)
        dB, dC = run.dB.to(call.B.dtype), run.dC.to(call.C.dtype)
        return dx.to(call.x.dtype), ddt.to(call.dt.dtype), run.dA.to(call.A.dtype), dB, dC, dD, dz, dbias, run.d_state


class _Tokens(NamedTuple):
    """Of equal-length sequences: delta and x [n, L, D], B and C [n, L, G, N]."""

    delta: Tensor
    x: Tensor
    B: Tensor
    C: Tensor

    def cut(self, start: int, size: int) -> "_Tokens":
        return _Tokens(*(part[:, start : start + size] for part in self))


class _Run:
    """One call between its step sizes and its skip."""

    def __init__(self, plan: Plan, call: SelectiveCall, cu_seqlens: Tensor | None) -> None:
        self.segment, self.chunk = plan["segment"], plan["chunk"]
        self.dtype = torch.promote_types(call.x.dtype, torch.float32)
        self.delta, self.softplus_grad = step_sizes(call, self.dtype)
        self.x, self.A, self.B, self.C = (part.to(self.dtype) for part in (call.x, call.A, call.B, call.C))
        self.groups, self.packed = call.B.shape[2], cu_seqlens is not None
        self.batches: list[Bucket | None] = [None]
        if cu_seqlens is not None:
            bounds = sequence_bounds(cu_seqlens, call.x.shape[1])
            self.batches = [*buckets(bounds, call.x.device)]
        sequences = call.x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.initial = call.initial_state
        if self.initial is None:
            self.initial = self.x.new_zeros(sequences, *self.A.shape)

    def _padded(self, batch: Bucket | None, x: Tensor) -> Tensor:
        return x if batch is None else batch.pad(x)

    def _tokens(self, batch: Bucket | None) -> _Tokens:
        return _Tokens(*(self._padded(batch, part) for part in (self.delta, self.x, self.B, self.C)))

    def _states(self, tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return decays and states of a segment [n, L, D, N], from the state [n, D, N] before it."""
        decay = (tokens.delta[..., None] * self.A).exp_()
        states = self._outer(tokens.delta * tokens.x, tokens.B)
        flat = states.flatten(2)
        scan(decay.flatten(2), flat, state.flatten(1), flat, min(self.chunk, flat.shape[1]))
        return decay, states

    def _outer(self, channels: Tensor, groups: Tensor) -> Tensor:
        """Of [n, L, D] and [n, L, G, N] the products [n, L, D, N], contiguous: a scan writes to a view of them."""
        products = channels.unflatten(2, (self.groups, -1))[..., None] * groups[:, :, :, None]
        return products.contiguous().flatten(2, 3)

    def _over_state(self, x: Tensor, groups: Tensor) -> Tensor:
        """Sum [n, L, D, N] times [n, L, G, N] over N."""
        return (x.unflatten(2, (self.groups, -1)) @ groups[..., None]).flatten(2)

    def _over_channels(self, x: Tensor, channels: Tensor) -> Tensor:
        """Sum [n, L, D, N] times [n, L, D] over the channels of each group."""
        return (channels.unflatten(2, (self.groups, 1, -1)) @ x.unflatten(2, (self.groups, -1)))[:, :, :, 0]

    def _segments(self, tokens: _Tokens) -> Iterator[tuple[int, _Tokens]]:
        for start in range(0, tokens.x.shape[1], self.segment):
            yield start, tokens.cut(start, self.segment)

    def forward(self) -> Tensor:
        """Return sum_n C_n S_n [B, T, D]; the final states are in `final`."""
        read = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        self.final = self.initial.clone()
        for batch in self.batches:
            rows = slice(None) if batch is None else batch.sequences
            tokens, state = self._tokens(batch), self.final[rows]
            out = read if batch is None else torch.empty_like(tokens.x)
            for start, cut in self._segments(tokens):
                _, states = self._states(cut, state)
                out[:, start : start + self.segment] = self._over_state(states, cut.C)
                state = states[:, -1]
            self.final[rows] = state
            if batch is not None:
                batch.unpad(out, read)
        return read

    def backward(self, grad: Tensor, grad_final: Tensor | None) -> None:
        """Find dx, d_delta, dA, dB, dC and d_state; grad: of sum_n C_n S_n [B, T, D]."""
        found = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (self.delta, self.x)]
        found += [torch.empty(part.shape, dtype=self.dtype, device=part.device) for part in (self.B, self.C)]
        self.dA = torch.zeros_like(self.A)
        self.d_state = torch.zeros_like(self.initial, memory_format=torch.contiguous_format)
        if grad_final is not None:
            self.d_state += grad_final
        for batch in self.batches:
            rows = slice(None) if batch is None else batch.sequences
            tokens, state = self._tokens(batch), self.initial[rows]
            given, into = self._padded(batch, grad), found
            if batch is not None:
                into = [torch.empty_like(part) for part in tokens]
            entries = []
            for _, cut in self._segments(tokens):
                entries.append(state)
                if len(entries) * self.segment < tokens.x.shape[1]:
                    state = self._states(cut, state)[1][:, -1].clone()
            d_state = self.d_state[rows]
            for start, cut in reversed([*self._segments(tokens)]):
                within = slice(start, start + self.segment)
                d_state, parts = self._segment_grads(cut, entries.pop(), given[:, within], d_state)
                for whole, part in zip(into, parts, strict=True):
                    whole[:, within] = part
            self.d_state[rows] = d_state
            if batch is not None:
                for whole, part in zip(found, into, strict=True):
                    batch.unpad(part, whole)
        self.d_delta, self.dx, self.dB, self.dC = found

    def _segment_grads(
        self, tokens: _Tokens, state: Tensor, grad: Tensor, d_state: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradient of the state before a segment, and those of its tokens; add to dA's."""
        decay, states = self._states(tokens, state)
        grads = self._outer(grad, tokens.C)
        # each state's gradient takes the place of what its output adds to it
        grads[:, -1] += d_state
        earlier = grads[:, :-1].flatten(2)
        scan(decay[:, 1:].flatten(2), earlier, grads[:, -1].flatten(1), earlier, max(1, self.chunk), reverse=True)
        dC = self._over_channels(states, grad)
        dB = self._over_channels(grads, tokens.delta * tokens.x)
        written = self._over_state(grads, tokens.B)
        # of the decays' logarithms; in place: gradients times decays, then times the states before
        decay *= grads
        d_state = decay[:, 0].clone()
        decay[:, 1:] *= states[:, :-1]
        decay[:, 0] *= state
        d_delta = torch.addcmul((decay * self.A).sum(-1), written, tokens.x)
        self.dA += (decay * tokens.delta[..., None]).sum((0, 1))
        return d_state, (d_delta, written * tokens.delta, dB, dC)
