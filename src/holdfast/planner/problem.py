"""One call of one op, as far as planning it is concerned."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes, dtype and traits of a call; hashable, so that plans can be cached by it.

    op: the public op's name. family: "dense", "diagonal", "matrix" or "selective". dtype: torch's name, such as
    "bfloat16".
    sizes: (name, value) pairs, names as in the op's docstring (B, T, H, K, V, ...).
    traits: what else decides which kernels can serve, such as "delta", "decay=vector", "varlen" or "needs_grad".
    """

    op: str
    family: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    traits: frozenset[str] = frozenset()

    @staticmethod
    def of(op: str, family: str, dtype: object, sizes: Mapping[str, int], traits: Mapping[str, bool]) -> "Problem":
        """The problem with the traits that hold. dtype: torch's, or its name."""
        present = frozenset(trait for trait, holds in traits.items() if holds)
        return Problem(op, family, str(dtype).removeprefix("torch."), tuple(sizes.items()), present)

    def __getitem__(self, name: str) -> int:
        for key, value in self.sizes:
            if key == name:
                return value
        raise KeyError(f"{self.op} has no size {name!r}; it has {', '.join(key for key, _ in self.sizes)}")

    @property
    def needs_grad(self) -> bool:
        return "needs_grad" in self.traits

    @property
    def varlen(self) -> bool:
        return "varlen" in self.traits
