"""Where sequences start and stop among the steps of a call, as indices into [B, T, ...] and into [N, ...]."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.varlen import refuse_copy_in_capture, sequence_bounds


@dataclass(frozen=True, slots=True)
class BoundarySteps:
    """x[starts] and x[stops]: first and last steps of the sequences that have any; states[members]: their states."""

    starts: tuple[Any, Any]
    stops: tuple[Any, Any]
    members: Any
    packed: bool

    @staticmethod
    def of(cu_seqlens: Tensor | None, length: int, device: torch.device) -> "BoundarySteps":
        """Find those of packed sequences, or of the rows of a batch, on device.

        Raises ValueError for offsets not from 0 to length, RuntimeError while a CUDA graph is captured there.
        """
        if cu_seqlens is None:
            rows = slice(None)
            return BoundarySteps((rows, 0), (rows, -1), rows, False)
        bounds = sequence_bounds(cu_seqlens, length)
        refuse_copy_in_capture(device, f"offsets on {cu_seqlens.device}")
        members = [n for n in range(len(bounds) - 1) if bounds[n + 1] > bounds[n]]
        starts = torch.tensor([bounds[n] for n in members], device=device, dtype=torch.int64)
        stops = torch.tensor([bounds[n + 1] - 1 for n in members], device=device, dtype=torch.int64)
        return BoundarySteps((0, starts), (0, stops), torch.tensor(members, device=device, dtype=torch.int64), True)
