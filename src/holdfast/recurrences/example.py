"""Random arguments of the scale that a model feeds a recurrence: one source for doctor, tests and benchmarks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an example call; each recurrence uses those that its shapes name. Hq=None means Hq = H."""

    B: int = 2
    T: int = 100
    H: int = 2
    K: int = 16
    V: int = 24
    D: int = 16
    N: int = 16
    Hq: int | None = None

    @property
    def query_heads(self) -> int:
        return self.H if self.Hq is None else self.Hq


class Draw:
    """Draws tensors of one dtype on one device from one seed; states and log decays are at least float32.

    On the meta device nothing is drawn: shapes and dtypes alone, for planning.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, torch.device(device)
        self.state_dtype = torch.promote_types(dtype, torch.float32)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.float64, device="meta")
        # always drawn in float64 on the CPU, so that every dtype and device sees the same example
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal with standard deviation scale."""
        return (self._normal(shape) * scale).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length 1 along the last axis, as normalised keys are."""
        return F.normalize(self._normal(shape), dim=-1).to(self.device, self.dtype)

    def gate(self, *shape: int) -> Tensor:
        """Values in (0, 1)."""
        return torch.sigmoid(self._normal(shape)).to(self.device, self.dtype)

    def log_decay(self, *shape: int) -> Tensor:
        """Natural-log decays, mostly -0.3 to 0, in float32 or wider."""
        return F.logsigmoid(self._normal(shape) + 3).to(self.device, self.state_dtype)

    def state(self, *shape: int) -> Tensor:
        """A state, float32 or wider."""
        return self._normal(shape).to(self.device, self.state_dtype)
