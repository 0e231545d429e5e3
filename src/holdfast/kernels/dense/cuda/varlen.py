"""Packed sequences as batches of equal lengths, for a backend that takes no others: filled up at their beginnings.

Sequences end together, so that the final state and its gradient are where a batch has them. What fills a sequence up
repeats its first token, and a reset where the sequence begins forgets what came of it: no state passes, nor a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.recurrences.definition import DenseCall

# Of the memory that a group takes, at least one part in so many holds tokens.
WASTE = 2

Forward = Callable[[DenseCall], tuple[Tensor, Tensor, Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that run as one batch [N, T].

    sequences: int64 [N]. source: the token at each place of the batch, int64 [N * T]. inside: bool [N, T], False where
    a sequence is filled up. begins: bool [N, T]. filled: the places that hold tokens, int64; tokens: those tokens.
    """

    sequences: Tensor
    source: Tensor
    inside: Tensor
    begins: Tensor
    filled: Tensor
    tokens: Tensor

    def batch(self, x: Tensor) -> Tensor:
        """Packed [tokens, ...] -> [N, T, ...]."""
        return x[self.source].unflatten(0, self.inside.shape)

    def call(self, call: DenseCall, x: Tensor) -> DenseCall:
        """The batch's call. x: the batch's own."""
        reset = self.begins if call.reset is None else self.begins | (self.batch(call.reset[0]) & self.inside)
        return call._replace(x=x, reset=reset)


def groups(cu_seqlens: Tensor, length: int, most: int, device: torch.device) -> list[Group]:
    """Sequences of like length together, at most so many, on device; empty ones are in none. Reads cu_seqlens, which
    may be on another device, on the host."""
    bounds = torch.tensor(varlen.sequence_bounds(cu_seqlens, length), dtype=torch.int64)
    varlen.refuse_copy_in_capture(device, f"offsets on {cu_seqlens.device}")
    lengths = bounds.diff()
    order = [n for n in lengths.argsort(descending=True, stable=True).tolist() if lengths[n] > 0]
    found: list[list[int]] = []
    tokens = 0
    for n in order:
        group = found[-1] if found else []
        here = int(lengths[n])
        if not group or len(group) == most or (len(group) + 1) * int(lengths[group[0]]) > WASTE * (tokens + here):
            found.append([])
            tokens = 0
        found[-1].append(n)
        tokens += here
    rows = [torch.tensor(group, dtype=torch.int64) for group in found]
    return [_group(bounds[:-1], lengths, group, device) for group in rows]


def _group(starts: Tensor, lengths: Tensor, sequences: Tensor, device: torch.device) -> Group:
    longest = int(lengths[sequences[0]])
    # how far each place is into its sequence, below 0 where it is filled up
    step = torch.arange(longest, dtype=torch.int64) - (longest - lengths[sequences])[:, None]
    source = (starts[sequences][:, None] + step.clamp_min(0)).flatten()
    inside = step >= 0
    filled = inside.flatten().nonzero()[:, 0]
    parts = (sequences, source, inside, step == 0, filled, source[filled])
    return Group(*(part.to(device) for part in parts))


def forward(
    every: Sequence[Group], call: DenseCall, count: int, save: bool, run: Forward
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run each group's call and return its results in the caller's order. count: of sequences."""
    tokens, heads, width = call.x.shape[1], *call.x.shape[3:]
    h = call.x.new_empty(1, tokens, heads, width)
    final = call.x.new_zeros(len(call.cell.states), count, heads, width, dtype=torch.float32)
    states, gates = call.x.new_empty(0, dtype=torch.float32), call.x.new_empty(0, dtype=torch.float32)
    for n, group in enumerate(every):
        found, last, their_states, their_gates = run(group.call(call, group.batch(call.x[0])))
        h[0, group.tokens] = found.flatten(0, 1)[group.filled]
        final[:, group.sequences] = last
        if save and n == 0:
            states = their_states.new_empty(their_states.shape[0], tokens, *their_states.shape[2:])
            gates = their_gates.new_empty(tokens, *their_gates.shape[1:])
        if save:
            states[:, group.tokens] = their_states[:, group.filled]
            gates[group.tokens] = their_gates[group.filled]
    return h, final, states, gates


def backward(
    every: Sequence[Group],
    call: DenseCall,
    h: Tensor,
    states: Tensor,
    gates: Tensor,
    grad_h: Tensor | None,
    grad_final: Tensor | None,
    run: Backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [1, tokens, gates, H, D], and dR and db as run returns them, summed over the groups."""
    dx = call.R.new_empty(call.x.shape)
    sums: list[Tensor] = []
    for group in every:
        given = None if grad_h is None else group.batch(grad_h[0]).masked_fill(~group.inside[:, :, None, None], 0)
        last = None if grad_final is None else grad_final[:, group.sequences]
        before = group.batch(h[0]), states[:, group.source], gates[group.source]
        # the backward pass reads the shape of x alone
        x = call.x[:, :1].expand(*group.inside.shape, *call.x.shape[2:])
        found, *rest, _ = run(group.call(call, x), *before, given, last)
        dx[0, group.tokens] = found.flatten(0, 1)[group.filled]
        sums = rest if not sums else [x + y for x, y in zip(sums, rest, strict=True)]
    return dx, *sums
