"""A pool of states, and which of them the sequences of a call are."""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.slots import Slots


class Pool(NamedTuple):
    """What a call reads and writes beside its tokens."""

    states: Tensor  # [slots, H, K, V], or [slots, H, V, K] with keys_last, dense but between slots; any floating dtype
    slots: Slots
    keys_last: bool
