"""What flashrnn returns first: the states at every token, of which h is there and the others are found if asked for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class States:
    """[S, B, T, H, D], or these axes behind S in another order: `states[0]` is h; all else makes a tensor of it.

    Tensor's methods and attributes, and PyTorch's functions, see that tensor, which is made once.
    """

    def __init__(self, h: Tensor, count: int, others: Callable[[], tuple[Tensor, ...]]) -> None:
        """h: the first of count states. others: makes the rest, each of h's shape."""
        self._h, self._count, self._others = h, count, others
        self._all: Tensor | None = None
        self._records = torch.is_grad_enabled()

    def tensor(self) -> Tensor:
        """All states as one tensor."""
        if self._all is None:
            # with gradients or without as where h was made, wherever they are asked for first
            with torch.set_grad_enabled(self._records):
                self._all = torch.stack([self._h, *self._others()])
        return self._all

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int) and first in (0, -self._count):
            return self._h[tuple(rest)] if rest else self._h
        return self.tensor()[index]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self._count, *self._h.shape])

    def __getattr__(self, name: str) -> Any:
        # what this class has itself comes not here; without this, copies of it would call themselves for ever
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x.tensor() if isinstance(x, cls) else x for x in args]
        named = {name: x.tensor() if isinstance(x, cls) else x for name, x in (kwargs or {}).items()}
        return function(*given, **named)
