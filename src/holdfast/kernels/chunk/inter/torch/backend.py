"""The scan of states between chunks in PyTorch, on any device: one loop over chunks, all heads at once.

Backward, with P = h_{g-1} - W Y^T h_{g-1} and a = exp(decay): dP = a dh_g, and h_{g-1} gets dP - Y W^T dP. The loop
carries that alone; the gradients of decay, W and Y follow for all chunks at once.
"""

import torch
from torch import Tensor

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.varlen import sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem

# of states, decay, W, Y and the initial state
Grads = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


class ChunkedInterChunkScan:
    """Every call, on every device that PyTorch has, in float32 (float64 for float64 states)."""

    name = "chunked"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def forward(
        self, plan: Plan, call: InterChunkCall, cu_seqlens: Tensor | None, keep_final: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return h_1 .. h_G [B, G, H, K, V] in states' dtype, and the final state [N, H, K, V] if keep_final."""
        run = _Run(call, cu_seqlens)
        out = torch.empty_like(call.states, memory_format=torch.contiguous_format)
        final = run.forward(out)
        return out, final if keep_final else None

    def backward(
        self,
        plan: Plan,
        call: InterChunkCall,
        cu_seqlens: Tensor | None,
        history: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
    ) -> Grads:
        """Return the gradients of states, decay, W, Y and the initial state.

        history: the forward's output where it is float32 or wider; None where it was rounded, to run forward again.
        """
        run = _Run(call, cu_seqlens)
        if history is None:
            history = torch.empty(call.states.shape, dtype=run.dtype, device=call.states.device)
            run.forward(history)
        return run.backward(history, grad_o, grad_final)


class _Run:
    def __init__(self, call: InterChunkCall, cu_seqlens: Tensor | None) -> None:
        self.call = call
        batch, self.chunks, *shape = call.states.shape
        self.dtype = torch.promote_types(call.states.dtype, torch.float32)
        decay = call.decay.to(self.dtype).exp()
        self.decay = decay[..., None, None] if decay.dim() == 3 else decay[..., None]
        self.W, self.Y = (None if x is None else x.to(self.dtype) for x in (call.W, call.Y))
        # the rows of the state that enter at a chunk, and those that leave after one
        if cu_seqlens is None:
            sequences, sequence_chunks = batch, [(slice(None), 0, self.chunks)]
        else:
            bounds = sequence_bounds(cu_seqlens, self.chunks)
            sequences = len(bounds) - 1
            sequence_chunks = [(slice(n, n + 1), bounds[n], bounds[n + 1]) for n in range(sequences)]
        self.enter = {start: rows for rows, start, stop in sequence_chunks if start < stop}
        self.leave = {stop - 1: rows for rows, start, stop in sequence_chunks if start < stop}
        if call.initial_state is None:
            self.initial = decay.new_zeros(sequences, *shape)
        else:
            self.initial = call.initial_state.to(self.dtype)

    def forward(self, out: Tensor) -> Tensor:
        """Fill out with the state after each chunk and return the final state, a tensor of its own."""
        final = self.initial.clone()
        state = self.initial
        for n in range(self.chunks):
            if n in self.enter:
                state = self.initial[self.enter[n]]
            if self.W is not None:
                state = state - self.W[:, n] @ (self.Y[:, n].mT @ state)
            state = self.decay[:, n] * state + self.call.states[:, n]
            out[:, n] = state
            if n in self.leave:
                final[self.leave[n]] = state
        return final

    def backward(self, history: Tensor, grad_o: Tensor | None, grad_final: Tensor | None) -> Grads:
        call = self.call
        grad_initial = torch.zeros_like(self.initial, memory_format=torch.contiguous_format)
        if grad_final is not None:
            grad_initial += grad_final
        grad = torch.empty(call.states.shape, dtype=self.dtype, device=call.states.device)
        carried = grad_initial
        for n in reversed(range(self.chunks)):
            if n in self.leave:
                carried = grad_initial[self.leave[n]]
            grad[:, n] = carried if grad_o is None else carried + grad_o[:, n]
            carried = self.decay[:, n] * grad[:, n]
            if self.W is not None:
                carried = carried - self.Y[:, n] @ (self.W[:, n].mT @ carried)
            if n in self.enter:
                grad_initial[self.enter[n]] = carried

        before = torch.empty_like(grad)
        before[:, 1:] = history[:, :-1]
        for n, rows in self.enter.items():
            before[:, n] = self.initial[rows]
        grad_W = grad_Y = None
        projected = before
        if self.W is not None:
            read = self.Y.mT @ before  # [B, G, H, r, V]
            projected = before - self.W @ read
            grad_projected = self.decay * grad
            grad_W = (-grad_projected @ read.mT).to(call.W.dtype)
            grad_Y = (-before @ (grad_projected.mT @ self.W)).to(call.Y.dtype)
        grad_decay = (grad * projected).sum(-1, keepdim=True)
        if call.decay.dim() == 3:
            grad_decay = grad_decay.sum(-2, keepdim=True)
        grad_decay = (grad_decay * self.decay).reshape(call.decay.shape).to(call.decay.dtype)
        return grad.to(call.states.dtype), grad_decay, grad_W, grad_Y, grad_initial
