"""Runs a differentiable scan over segments of time, keeping only the state between them.

The forward pass stores nothing; the backward pass sweeps once to find the state that enters each segment, then walks
the segments from last to first, running each again to differentiate it. Memory beyond inputs and outputs is that of one
segment.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from .vjp import vjp

Inputs = Sequence[Tensor | None]
Step = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def _slice(inputs: Inputs, start: int, size: int) -> list[Tensor | None]:
    return [None if x is None else x[:, start : start + size] for x in inputs]


def forward(step: Step, inputs: Inputs, state: Tensor, length: int, size: int, out: Tensor) -> Tensor:
    """Runs step over inputs [B, T, ...] cut along time, writes its outputs to out, returns the final state."""
    for start in range(0, length, size):
        o, state = step(_slice(inputs, start, size), state)
        out[:, start : start + size] = o
    return state


def final_state(
    run_state: Callable[[Inputs, Tensor], Tensor], inputs: Inputs, state: Tensor, length: int, size: int
) -> Tensor:
    """forward's final state alone."""
    for start in range(0, length, size):
        state = run_state(_slice(inputs, start, size), state)
    return state


def backward(
    step: Step,
    run_state: Callable[[Inputs, Tensor], Tensor],
    inputs: Inputs,
    state: Tensor,
    length: int,
    size: int,
    grad_out: Tensor | None,
    grad_state: Tensor,
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of forward: for each input (None where the input is), and for the initial state.

    run_state: step's new state alone, for the sweep that finds the states between segments.
    """
    entries = [state]
    for start in range(0, length - size, size):
        entries.append(run_state(_slice(inputs, start, size), entries[-1]))
    # empty_like keeps no strides: an input may be expanded, its gradient is not
    grads = [None if x is None else x.new_empty(x.shape) for x in inputs]
    for n in reversed(range(len(entries))):
        start = n * size
        pieces = _slice(inputs, start, size)

        def run(state: Tensor, *present: Tensor, pieces: Inputs = pieces) -> tuple[Tensor, Tensor]:
            rest = iter(present)
            return step([None if x is None else next(rest) for x in pieces], state)

        grad_o = None if grad_out is None else grad_out[:, start : start + size]
        leaves = [entries.pop(), *(x for x in pieces if x is not None)]
        grad_state, *found = vjp(run, leaves, [grad_o, grad_state])
        for grad, piece in zip((x for x in grads if x is not None), found, strict=True):
            grad[:, start : start + size] = piece
    return grads, grad_state
