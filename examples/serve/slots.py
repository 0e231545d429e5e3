"""Where states are: a pool of slots, and which slots hold the state behind a prefix that was seen before."""

from collections import OrderedDict

import torch
from model import Model
from torch import Tensor


class Pool:
    """States of all layers in `count` slots, some of them free."""

    def __init__(self, model: Model, count: int, dtype: torch.dtype = torch.float32) -> None:
        state, tail = model.state_shapes()
        weight = model.embed.weight
        self.layers = [
            (
                torch.zeros(count, *state, dtype=dtype, device=weight.device),
                torch.zeros(count, *tail, dtype=weight.dtype, device=weight.device),
            )
            for _ in model.layers
        ]
        self.free = list(range(count))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, slots: list[int]) -> None:
        self.free += slots

    def store(self, slot: int, states: list[tuple[Tensor, Tensor]]) -> None:
        for layer, given in zip(self.layers, states, strict=True):
            for pool, x in zip(layer, given, strict=True):
                pool[slot] = x[0]

    def load(self, slot: int | None) -> list[tuple[Tensor, Tensor]]:
        """Copies [1, ...] of a slot's states, as a prefill takes them; of no slot, those before any token."""
        return [
            (torch.zeros_like(pool[:1]).float(), torch.zeros_like(tails[:1]))
            if slot is None
            else (pool[slot, None].float(), tails[slot, None].clone())
            for pool, tails in self.layers
        ]


class PrefixCache:
    """States behind whole blocks of prompts. The one that was used longest ago is given up first."""

    def __init__(self, pool: Pool, block: int) -> None:
        self.pool, self.block = pool, block
        self.held: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.found = 0

    def longest(self, tokens: list[int]) -> tuple[int, int | None]:
        """How many tokens of a prompt, fewer than all, have a state, and its slot."""
        for length in range((len(tokens) - 1) // self.block * self.block, 0, -self.block):
            prefix = tuple(tokens[:length])
            if prefix in self.held:
                self.held.move_to_end(prefix)
                self.found += length
                return length, self.held[prefix]
        return 0, None

    def add(self, tokens: list[int], states: list[tuple[Tensor, Tensor]]) -> None:
        """Keeps the states behind these tokens, if a slot is free."""
        prefix = tuple(tokens)
        if prefix not in self.held and self.pool.free:
            (self.held[prefix],) = self.pool.take(1)
            self.pool.store(self.held[prefix], states)

    def make_room(self, count: int) -> bool:
        """Gives up states until so many slots are free; whether they are."""
        while len(self.pool.free) < count and self.held:
            self.pool.give_back([self.held.popitem(last=False)[1]])
        return len(self.pool.free) >= count
