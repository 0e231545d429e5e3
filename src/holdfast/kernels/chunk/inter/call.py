"""The arguments of `inter_chunk_scan`, for all of its backends."""

from typing import NamedTuple

from torch import Tensor


class InterChunkCall(NamedTuple):
    """h_g = exp(decay_g) (h_{g-1} - W_g Y_g^T h_{g-1}) + states_g for each chunk g; without W and Y the decay alone."""

    states: Tensor  # [B, G, H, K, V]
    decay: Tensor  # natural log, [B, G, H] or [B, G, H, K]
    W: Tensor | None = None  # [B, G, H, K, r]
    Y: Tensor | None = None  # [B, G, H, K, r]
    initial_state: Tensor | None = None  # [N, H, K, V]
