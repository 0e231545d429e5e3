"""Packed sequences of unequal length, as the PyTorch backends see them: a few padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.recording import note_values_read


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences whose lengths lie within a factor of two, as rows of one padded batch.

    sequences: their numbers, [n]. index: [n, L] positions in the packed axis; valid: [n, L], False on padding.
    """

    sequences: Tensor
    index: Tensor
    valid: Tensor

    def pad(self, packed: Tensor, fill: float = 0.0) -> Tensor:
        """[1, T, ...] -> [n, L, ...], padding set to fill."""
        rows = packed[0, self.index.clamp_max(packed.shape[1] - 1)]
        mask = self.valid.reshape(self.valid.shape + (1,) * (packed.dim() - 2))
        return torch.where(mask, rows, fill)

    def unpad(self, padded: Tensor, packed: Tensor) -> None:
        """Writes [n, L, ...] into its places of [1, T, ...]."""
        packed[0, self.index[self.valid]] = padded[self.valid].to(packed.dtype)


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Of x [B, ...]: B, or with cu_seqlens [N + 1] N. May be a symbol."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def sequence_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    """The offsets as integers. Raises ValueError unless they rise from 0 to length, RuntimeError while a CUDA graph is
    captured."""
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("cu_seqlens: its offsets are read on the host, which a CUDA graph cannot capture")
    note_values_read()
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens: expected offsets from 0 to T = {length}; got {bounds[0]} to {bounds[-1]}")
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens: expected offsets that do not decrease; got {start} then {end} at {n + 1}")
    return bounds


def refuse_copy_in_capture(device: torch.device, given: str) -> None:
    """Raises RuntimeError where offsets would go from the host to device while a CUDA graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"cu_seqlens: expected offsets on {device}, on a backend that reads them there, while a CUDA graph is "
            f"captured, which copies nothing from the host; got {given}"
        )


def placed(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """The offsets, contiguous on device. Raises RuntimeError where a captured CUDA graph would have to copy them."""
    if cu_seqlens.device.type != device.type:
        refuse_copy_in_capture(device, f"offsets on {cu_seqlens.device}")
    return cu_seqlens.to(device).contiguous()


def on_device(cu_seqlens: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """The offsets as a kernel reads them, contiguous on its device; unchecked while a CUDA graph is captured.

    Raises ValueError unless they rise from 0 to length, RuntimeError where a captured graph would have to copy them.
    """
    if cu_seqlens is None:
        return None
    if not (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        sequence_bounds(cu_seqlens, length)
    return placed(cu_seqlens, device)


def buckets(bounds: Sequence[int], device: torch.device) -> list[Bucket]:
    """Groups the non-empty sequences between the bounds by length, padding at most doubling the tokens.

    Raises RuntimeError while a CUDA graph is captured on device.
    """
    refuse_copy_in_capture(device, "a backend that groups the sequences on the host")
    groups: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            groups.setdefault((end - start - 1).bit_length(), []).append(n)
    result = []
    for members in groups.values():
        starts = torch.tensor([bounds[n] for n in members], dtype=torch.int64, device=device)
        lengths = torch.tensor([bounds[n + 1] - bounds[n] for n in members], dtype=torch.int64, device=device)
        steps = torch.arange(int(lengths.max()), dtype=torch.int64, device=device)
        valid = steps < lengths[:, None]
        numbers = torch.tensor(members, dtype=torch.int64, device=device)
        result.append(Bucket(numbers, starts[:, None] + steps, valid))
    return result
