"""What the layers share: checks of sizes and inputs, and a step that is a sequence of one token."""

import mlx.core as mx
import mlx.nn as nn

from ..check import check_count, check_float


class Layer(nn.Module):
    """A sequence mixer: `layer(x [B, L, d_model], state=None) -> (y [B, L, d_model], state)`."""

    d_model: int

    def step(self, x: mx.array, state: tuple[mx.array, ...] | None = None) -> tuple[mx.array, tuple[mx.array, ...]]:
        """One token, for decoding: x [B, d_model] -> (y [B, d_model], the next state)."""
        if isinstance(x, mx.array) and x.ndim != 2:
            raise ValueError(f"x: expected shape [B, {self.d_model}]; got {list(x.shape)}")
        check_float("x", x)
        y, state = self(x[:, None], state)
        return y.squeeze(1), state

    def check_input(self, x: mx.array) -> None:
        check_float("x", x)
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x: expected shape [B, L, {self.d_model}]; got {list(x.shape)}")


def check_states(state: tuple[mx.array, ...] | None, count: int) -> tuple[mx.array | None, ...]:
    """The parts of a state; each is checked where it is used."""
    if state is None:
        return (None,) * count
    if not isinstance(state, tuple | list) or len(state) != count:
        got = f"{len(state)} of them" if isinstance(state, tuple | list) else type(state).__name__
        raise ValueError(f"state: expected a tuple of {count}; got {got}")
    return tuple(state)


def head_width(name: str, expand: float, d_model: int, heads: int) -> int:
    """Channels of each head: expand * d_model / heads, which must be whole."""
    check_count("d_model", d_model)
    check_count("num_heads", heads)
    width = round(expand * d_model)
    if width < 1 or abs(width - expand * d_model) > 1e-6 or width % heads:
        raise ValueError(
            f"{name}: expected {name} * d_model to be a multiple of num_heads = {heads}; got {expand * d_model}"
        )
    return width // heads


def check_positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number; got {value}")
    return value
