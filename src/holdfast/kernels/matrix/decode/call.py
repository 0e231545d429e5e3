"""A pool of states, and which of them the sequences of a call are."""

from typing import NamedTuple

from torch import Tensor


class Pool(NamedTuple):
    """What a call reads and writes beside its tokens. What is no number of a slot is neither read nor written."""

    states: Tensor  # [slots, H, K, V], or [slots, H, V, K] with keys_last, dense but between slots; any floating dtype
    slots: Tensor  # int32 [B], contiguous: where each sequence's state is
    next_slots: Tensor  # int32, contiguous: where it goes, [B], or [B, L] after each token
    accepted: Tensor | None  # int32 [B], contiguous: after how many tokens it goes there; None for all
    keys_last: bool
