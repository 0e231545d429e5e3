"""The plain step loop: slow, right, and able to run every call on every device."""

import torch
from torch import Tensor

from holdfast.kernels.autograd import segmented as segments
from holdfast.kernels.varlen import sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import DiagonalCall
from holdfast.recurrences.oracle_diagonal import diagonal_steps

Grads = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Reference:
    """Runs the family's oracle, packed sequences one by one; its backward differentiates a segment at a time."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name, (("segment", 64),))),)

    def forward(
        self, plan: Plan, call: DiagonalCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return h [B, T, D] in x's dtype, and the final state [N, D]; entries are left as they are."""
        out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
        final = _initial_state(call, cu_seqlens)
        for rows, steps in _pieces(cu_seqlens, call.x):
            inputs = [None if x is None else x[:, steps] for x in (call.a, call.x, call.theta)]
            length, o = steps.stop - steps.start, out[:, steps]
            final[rows] = segments.forward(_step(call.log), inputs, final[rows], length, plan["segment"], o)
        return out, final

    def backward(
        self,
        plan: Plan,
        call: DiagonalCall,
        cu_seqlens: Tensor | None,
        states: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        entries: Tensor | None = None,
    ) -> Grads:
        """Return the gradients of a, x, theta (None without theta) and the initial state.

        states, entries: not used.
        """
        step = _step(call.log)
        state = _initial_state(call, cu_seqlens)
        grad_state = torch.zeros_like(state)
        if grad_final is not None:
            grad_state += grad_final
        inputs = (call.a, call.x, call.theta)
        grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        for rows, steps in _pieces(cu_seqlens, call.x):
            found, grad_state[rows] = segments.backward(
                step,
                lambda pieces, state: step(pieces, state)[1],
                [None if x is None else x[:, steps] for x in inputs],
                state[rows],
                steps.stop - steps.start,
                plan["segment"],
                None if grad_o is None else grad_o[:, steps],
                grad_state[rows],
            )
            for grad, piece in zip(grads, found, strict=True):
                if grad is not None:
                    grad[:, steps] = piece
        return *grads, grad_state


def _initial_state(call: DiagonalCall, cu_seqlens: Tensor | None) -> Tensor:
    """Make the initial state, a tensor of its own, float32 or wider."""
    if call.initial_state is not None:
        return call.initial_state.clone()
    sequences = call.x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    return call.x.new_zeros(sequences, call.x.shape[2], dtype=dtype)


def _pieces(cu_seqlens: Tensor | None, x: Tensor) -> list[tuple[slice, slice]]:
    """Return (sequences, steps) of each run of the loop that has any steps."""
    if cu_seqlens is None:
        return [(slice(None), slice(0, x.shape[1]))] if x.shape[1] else []
    bounds = sequence_bounds(cu_seqlens, x.shape[1])
    return [
        (slice(n, n + 1), slice(bounds[n], bounds[n + 1])) for n in range(len(bounds) - 1) if bounds[n + 1] > bounds[n]
    ]


def _step(log: bool) -> segments.Step:
    def step(inputs: segments.Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        a, x, theta = inputs
        return diagonal_steps(DiagonalCall(a, x, theta, state, log))

    return step
