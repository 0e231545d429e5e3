"""What every backend of SSD's step sizes and log decays is given."""

from typing import NamedTuple

import torch
from torch import Tensor


class StepsCall(NamedTuple):
    """step = softplus(dt + dt_bias), or dt + dt_bias, and the log decay step * A.

    dtype: of both and of the arithmetic, float32 or float64.
    """

    dt: Tensor  # [B, T, H]
    A: Tensor  # [H], negative; with log, the natural logarithm of -A
    dt_bias: Tensor | None = None  # [H]
    softplus: bool = False
    log: bool = False
    dtype: torch.dtype = torch.float32

    @staticmethod
    def beside(x: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, softplus: bool, log: bool) -> "StepsCall":
        """Make the call of a scan over x, in float64 where one of the tensors is."""
        given = (x, dt, A, dt_bias)
        exact = any(each is not None and each.dtype == torch.float64 for each in given)
        return StepsCall(dt, A, dt_bias, softplus, log, torch.float64 if exact else torch.float32)
