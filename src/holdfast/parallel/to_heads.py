"""Each rank's rows of packed weights that are held as Shard(0): one exchange for all of a module's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .sections import Interval, Routes


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of weights of one dtype: their routes, and the ranks they go between."""

    routes: tuple[Routes, ...]
    group: ProcessGroup
    rank: int
    size: int

    def sent(self, rank: int) -> list[tuple[int, tuple[Interval, ...]]]:
        """Of each weight, what this rank sends to another."""
        return [(n, route.pieces[self.rank][rank]) for n, route in enumerate(self.routes)]


class _ToHeads(torch.autograd.Function):
    """Backwards gradients go to the rows' holders, who add up what several ranks have of a row."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.shapes = [x.shape for x in held]
        parts = [
            [held[n][a:b] for n, pieces in exchange.sent(rank) for a, b in pieces] for rank in range(exchange.size)
        ]
        came = _exchanged(exchange, parts, _counts(exchange, held, True), held[0])
        found = [x.new_zeros(route.local, *x.shape[1:]) for x, route in zip(held, exchange.routes, strict=True)]
        at = [0] * len(held)
        for holder, flat in enumerate(came):
            start = 0
            for n, route in enumerate(exchange.routes):
                rows = route.rows(holder, exchange.rank)
                target = found[n][at[n] : at[n] + rows]
                target.copy_(flat[start : start + target.numel()].view(target.shape))
                at[n] += rows
                start += target.numel()
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        parts, at = [], [0] * len(grads)
        for holder in range(exchange.size):
            part = []
            for n, route in enumerate(exchange.routes):
                rows = route.rows(holder, exchange.rank)
                part.append(grads[n][at[n] : at[n] + rows])
                at[n] += rows
            parts.append(part)
        found = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        for rank, flat in enumerate(_exchanged(exchange, parts, _counts(exchange, found, False), grads[0])):
            start = 0
            for n, pieces in exchange.sent(rank):
                for a, b in pieces:
                    target = found[n][a:b]
                    target.add_(flat[start : start + target.numel()].view(target.shape))
                    start += target.numel()
        return None, *found


def _counts(exchange: Exchange, held: Sequence[Tensor], forward: bool) -> list[int]:
    """Numbers that come from each rank."""
    row = [x[0].numel() if len(x) else x.shape[1:].numel() for x in held]
    me = exchange.rank
    return [
        sum(
            (route.rows(other, me) if forward else route.rows(me, other)) * numbers
            for route, numbers in zip(exchange.routes, row, strict=True)
        )
        for other in range(exchange.size)
    ]


def _exchanged(exchange: Exchange, parts: list[list[Tensor]], counts: list[int], like: Tensor) -> Sequence[Tensor]:
    """What came from each rank, flat. parts: what goes to each."""
    sent = torch.cat([x.reshape(-1) for part in parts for x in part] or [like.new_empty(0)])
    came = like.new_empty(sum(counts))
    sizes = [sum(x.numel() for x in part) for part in parts]
    dist.all_to_all_single(came, sent, counts, sizes, group=exchange.group)
    return came.split(counts)


def to_heads(held: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, ...]:
    """Of weights of which each rank holds the rows that Shard(0) gives it, the rows that this rank needs.

    Differentiable; every rank takes part, and in the backward pass too.
    """
    return _ToHeads.apply(exchange, *held)
