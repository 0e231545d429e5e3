"""Random arguments drawn where they are used: large ones take seconds on a CPU."""

import torch
from torch import Tensor

from holdfast.recurrences import Draw


class DeviceDraw(Draw):
    """As Draw, but in float32 and on the device itself; a seed gives other values on another device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(seed, dtype, device)
        if self.device.type == "cuda":
            self.generator = torch.Generator(self.device).manual_seed(seed)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cuda":
            return super()._normal(shape)
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)
