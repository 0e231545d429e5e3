"""Where states are: a pool of slots, and which slots hold the state behind a prefix that was seen before."""

from collections import OrderedDict

import torch
from model import Model


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


class PrefixCache:
    """States behind whole blocks of prompts. The one that was used longest ago is given up first."""

    def __init__(self, pool: Pool, block: int) -> None:
        self.pool, self.block = pool, block
        self.held: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.found = 0

    def longest(self, tokens: list[int]) -> tuple[int, int]:
        """How many tokens of a prompt, fewer than all, have a state, and its slot; -1 for none."""
        for length in range((len(tokens) - 1) // self.block * self.block, 0, -self.block):
            prefix = tuple(tokens[:length])
            if prefix in self.held:
                self.held.move_to_end(prefix)
                self.found += length
                return length, self.held[prefix]
        return 0, -1

    def keep(self, tokens: list[int], start: int) -> list[int]:
        """Slots for the states behind each block of a prompt from start, a block's end, on, which a prefill is to fill;
        -1 for what is held already, and where no slot is free."""
        found = []
        for end in range(start + self.block, len(tokens) + 1, self.block):
            prefix = tuple(tokens[:end])
            (slot,) = [-1] if prefix in self.held or not self.pool.free else self.pool.take(1)
            if slot >= 0:
                self.held[prefix] = slot
            found.append(slot)
        return found

    def make_room(self, count: int) -> bool:
        """Gives up states until so many slots are free; whether they are."""
        while len(self.pool.free) < count and self.held:
            self.pool.give_back([self.held.popitem(last=False)[1]])
        return len(self.pool.free) >= count
