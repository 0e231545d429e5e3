"""What the delta rule with a vector decay finds of all chunks at once, in one tensor for the backward pass to keep."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.planner.models.matrix.tiles import CHUNK, chunk_places

# bytes at whose multiples TMA finds a tensor
ALIGNMENT = 128


class Chunks(NamedTuple):
    """What all chunks are at once: see states.py."""

    q_in: Tensor  # [B, T, H, K]
    k_in: Tensor  # [B, T, H, K]
    k_out: Tensor  # [B, T, H, K]
    decay: Tensor  # float32 [slots, H, K]
    scores: Tensor  # [B, T, H, CHUNK]
    pairs: Tensor  # float32 [B, T, H, CHUNK]
    inverse: Tensor  # [B, T, H, CHUNK]


class SavedChunks(NamedTuple):
    """Sizes of a call: v's first three, K, how many sequences are packed, if they are, and the inputs' dtype."""

    batch: int
    length: int
    heads: int
    keys: int
    sequences: int | None
    dtype: torch.dtype

    @property
    def slots(self) -> int:
        """One for each chunk; for packed sequences, whose lengths stay on the device, as many as there may be."""
        return self.batch * chunk_places(self.length, self.sequences)

    def _parts(self) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and dtype of each of `Chunks`."""
        tokens = self.batch, self.length, self.heads
        for _ in range(3):
            yield (*tokens, self.keys), self.dtype
        yield (self.slots, self.heads, self.keys), torch.float32
        for dtype in (self.dtype, torch.float32, self.dtype):
            yield (*tokens, CHUNK), dtype

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """The first byte of each of `Chunks`, and the one after its last."""
        first = 0
        for sizes, dtype in self._parts():
            end = first + prod(sizes) * dtype.itemsize
            yield first, end
            first = -(-end // ALIGNMENT) * ALIGNMENT

    @property
    def bytes(self) -> int:
        *_, (_, end) = self._bounds()
        return end

    def empty(self, device: torch.device) -> Tensor:
        """Room for all: uint8 [1, bytes]."""
        return torch.empty(1, self.bytes, dtype=torch.uint8, device=device)

    def chunks(self, saved: Tensor) -> Chunks:
        """Return the parts of `empty`."""
        parts = zip(self._parts(), self._bounds(), strict=True)
        return Chunks(*(saved[0, first:end].view(dtype).view(sizes) for (sizes, dtype), (first, end) in parts))
