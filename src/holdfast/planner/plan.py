"""How a call runs: which backend, and the integers that its kernel takes."""

from dataclasses import dataclass
from typing import Literal

# A pass of an op; each is planned apart.
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Plan:
    """backend: whose kernels run. values: (name, integer) pairs, the only tuning argument that a kernel takes.

    A backend whose gradients are another's kernels offers that one's plans for them.
    """

    backend: str
    values: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> int:
        for key, value in self.values:
            if key == name:
                return value
        raise KeyError(f"the {self.backend} plan has no {name!r}; it has {', '.join(key for key, _ in self.values)}")

    def __str__(self) -> str:
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.values)])
