"""The sequences of one call as the ops take them: a batch, or a PackedSequence turned into packed tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens [B, T, ...], with cu_seqlens [N + 1] and B = 1 where they are packed.

    backwards: for each packed token the one that takes its place when every sequence is turned round.
    """

    x: Tensor
    cu_seqlens: Tensor | None = None
    backwards: Tensor | None = None

    @property
    def count(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def turned(self, x: Tensor) -> Tensor:
        """x [B, T, ...] with every sequence turned round."""
        return x.flip(1) if self.backwards is None else x[:, self.backwards]


def unpack(packed: PackedSequence) -> tuple[Sequences, Tensor]:
    """The sequences in the order of the packing, longest first, and the place of each of their tokens in its data."""
    sizes = packed.batch_sizes
    steps, numbers = torch.arange(len(sizes)), torch.arange(int(sizes[0]))
    running = numbers[:, None] < sizes
    lengths = running.sum(1)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = ((sizes.cumsum(0) - sizes) + numbers[:, None])[running]
    backwards = (cu_seqlens[1:, None] - 1 - steps)[running]
    device = packed.data.device
    place = place.to(device)
    return Sequences(packed.data[None, place], cu_seqlens.to(device), backwards.to(device)), place


def pack(x: Tensor, place: Tensor, like: PackedSequence) -> PackedSequence:
    """The reverse of unpack for x [1, tokens, ...]."""
    data = torch.empty_like(x[0]).index_copy(0, place, x[0])
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)
