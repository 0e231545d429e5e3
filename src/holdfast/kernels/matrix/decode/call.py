"""A pool of states, and which of them the sequences of a call are; mLSTM's tokens, whose gates need a state's m."""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.slots import Slots


class Pool(NamedTuple):
    """What a call reads and writes beside its tokens."""

    states: Tensor  # [slots, H, K, V], or [slots, H, V, K] with keys_last, dense but between slots; any floating dtype
    slots: Slots
    keys_last: bool


class NormalizedPool(NamedTuple):
    """A pool of mLSTM's states: one number is a slot of all three."""

    C: Tensor  # as the states of a Pool
    n: Tensor  # [slots, H, K], any floating dtype
    m: Tensor  # [slots, H], float32 or wider
    slots: Slots
    keys_last: bool


class NormalizedTokens(NamedTuple):
    """A few tokens of mLSTM."""

    q: Tensor  # [B, L, Hq, K], H a multiple of Hq
    k: Tensor  # [B, L, Hq, K]
    v: Tensor  # [B, L, H, V]
    i: Tensor  # [B, L, H], pre-activations
    f: Tensor
    scale: float
    eps: float
    exponential: bool  # gating
    normalize: bool
