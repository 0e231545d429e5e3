"""The gates of the linear recurrent units: projections within heads, and a decay that starts between given bounds."""

import mlx.core as mx
import mlx.nn as nn

SLOWEST, FASTEST = 0.999, 0.9


class HeadLinear(nn.Module):
    """y_h = W_h x_h + b_h for each head h, on the last axis of x [..., heads * inputs], laid out head by head."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = mx.random.normal((heads, inputs, outputs)) * inputs**-0.5
        self.bias = mx.zeros((heads, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        """[..., heads * inputs] -> [..., heads, outputs]."""
        heads, inputs, _ = self.weight.shape
        x = x.reshape(*x.shape[:-1], heads, 1, inputs)
        return (x @ self.weight).squeeze(-2) + self.bias


def initial_rate(channels: int, strength: float) -> mx.array:
    """Lambda [channels] such that exp(-strength softplus(Lambda)) is uniform between 0.9 and 0.999."""
    rate = -mx.log(mx.random.uniform(FASTEST, SLOWEST, (channels,))) / strength
    return mx.log(mx.expm1(rate))


def log_magnitude(gate: mx.array, rate: mx.array, strength: float) -> mx.array:
    """log a = -strength softplus(Lambda) sigmoid(gate), float32."""
    return -strength * nn.softplus(rate.astype(mx.float32)) * mx.sigmoid(gate.astype(mx.float32))


def input_scale(log_a: mx.array) -> mx.array:
    """sqrt(1 - a^2), which keeps the state's variance that of the input, exact also where a is near 1."""
    # the bound is below every square that float32 resolves; it stops the gradient where a is 1, which is infinite there
    return mx.sqrt(mx.maximum(-mx.expm1(2 * log_a), 1e-30))
