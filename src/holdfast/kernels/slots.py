"""Which states of a pool a call's sequences read and write."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """int32, contiguous. What is no number of a slot, as -1, is neither read nor written."""

    read: Tensor  # [B], where each sequence's state is
    write: Tensor  # where it goes: [B], or [B, T] after each token
    accepted: Tensor | None  # [B], after how many tokens it goes there, beside write [B]; None for all

    @property
    def is_each(self) -> bool:
        """Whether the state after every token has a place."""
        return self.write.dim() == 2

    def are_read(self, count: int) -> Tensor:
        """Which sequences have a state in a pool of so many, [B]."""
        return _in(self.read, count)

    def put(self, pool: Tensor, state: Tensor, tokens: int, length: int) -> None:
        """Writes the states [B, ...] after so many of `length` tokens to those of the pool [slots, ...] that are due.

        Reads numbers on the host.
        """
        due = self.are_read(pool.shape[0])
        if self.is_each:
            if not tokens:
                return
            places = self.write[:, tokens - 1]
        else:
            places = self.write
            due = due & ((length if self.accepted is None else self.accepted) == tokens)
        due = due & _in(places, pool.shape[0])
        pool[places[due]] = state[due].to(pool.dtype)

    def get(self, pool: Tensor) -> Tensor:
        """The states [B, ...] of a pool with a slot at least; of a sequence without one, any."""
        return pool[torch.where(self.are_read(pool.shape[0]), self.read, 0)]


def read_states(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [N, ...] in slots [N] of a pool [S, ...]; zeros where there is no such slot. Waits for no GPU."""
    if not pool.shape[0]:
        return pool.new_zeros(slots.shape[0], *pool.shape[1:], dtype=dtype)
    there = _in(slots, pool.shape[0])
    found = pool.index_select(0, torch.where(there, slots, 0))
    return torch.where(_beside(there, found), found, 0.0).to(dtype)


def write_states(pool: Tensor, slots: Tensor, states: Tensor) -> None:
    """Puts states [N, ...] into slots [N] of a pool [S, ...], rounded to its dtype, each where there is such a slot.

    Waits for no GPU. Of states for one slot any may be there in the end.
    """
    if not pool.shape[0] or not slots.shape[0]:
        return
    there = _in(slots, pool.shape[0])
    # a row without a slot writes what another one writes too, or what slot 0 has already
    some = there.int().argmax(0, keepdim=True)
    none = ~there.any()
    slot = torch.where(none, 0, slots.index_select(0, some))
    state = torch.where(none, pool[:1], states.index_select(0, some).to(pool.dtype))
    states = torch.where(_beside(there, states), states.to(pool.dtype), state)
    pool.index_copy_(0, torch.where(there, slots, slot).long(), states)


def _beside(flags: Tensor, states: Tensor) -> Tensor:
    return flags.reshape(-1, *(1,) * (states.dim() - 1))


def _in(places: Tensor, count: int) -> Tensor:
    return (places >= 0) & (places < count)
