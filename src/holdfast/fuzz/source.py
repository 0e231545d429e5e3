"""Random values of the kinds that ops take, all from one seed, in float32 on the CPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Value(NamedTuple):
    """One argument before it has a dtype. kind: "input", "gate", "state" or "bool"."""

    kind: str
    x: Tensor


class Source:
    """Draws tensors and choices."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32)

    def integer(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def choose(self, among: Sequence[Any]) -> Any:
        return among[self.integer(len(among))]

    def log_decay(self, strength: str, *shape: int) -> Tensor:
        """At most 0: mild, weak (near 0), strong, zero, inf (mild, and some -inf) or mixed."""
        mild = F.logsigmoid(self.normal(*shape) + 3)
        if strength == "mild":
            return mild
        strong = -(self.normal(*shape) * 1.5 + 1).exp()
        which = self.uniform(*shape)
        if strength == "strong":
            return strong
        if strength == "weak":
            return mild * 1e-3
        if strength == "zero":
            return mild * 0
        if strength == "inf":
            return torch.where(which < 0.06, -torch.inf, mild)
        mixed = torch.where(which < 0.3, strong, mild)
        mixed = torch.where(which > 0.8, 0.0, mixed)
        mixed = torch.where(which > 0.93, -1e4, mixed)
        return torch.where(which > 0.97, -torch.inf, mixed)

    def sized(self, values: str, half: bool, *shape: int) -> Tensor:
        """Normal values: normal, large, small or sparse (half of the tokens are 0). half: in float16's range."""
        x = self.normal(*shape)
        if values == "large":
            return x * (8 if half else 64)
        if values == "small":
            return x * 1e-2
        if values == "sparse" and len(shape) > 2:
            return x * (self.uniform(*shape[:2], *(1,) * (len(shape) - 2)) < 0.5)
        return x
