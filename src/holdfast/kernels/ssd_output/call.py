"""What every backend of the layer's end is given."""

from typing import NamedTuple

from torch import Tensor


class OutputCall(NamedTuple):
    """y = (o + D x) silu(z), and with weight / sqrt(mean((o + D x)^2 silu(z)^2) + eps) * weight.

    The mean is over groups of H P / G channels.
    """

    o: Tensor  # [B, T, H, P]
    x: Tensor  # [B, T, H, P]
    D: Tensor | None = None  # [H] or [H, P]
    z: Tensor | None = None  # [B, T, H, P]
    weight: Tensor | None = None  # [G, H P / G]
    eps: float = 0.0

    @property
    def is_o(self) -> bool:
        """Whether nothing is asked for."""
        return self.D is None and self.z is None and self.weight is None
