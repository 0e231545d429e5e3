"""The mixer around the rotational linear recurrent unit: gated as Griffin's, on pairs that turn."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..rotlru import rotlru_scan_with_state
from .gates import HeadLinear, initial_rate, input_scale, log_magnitude
from .layer import Layer, check_positive, check_states, head_width

State = tuple[mx.array]


class RotLRU(Layer):
    """A linear recurrent unit on pairs of channels, with a magnitude and an angle a pair and token:

        u, z = W x;  r, i = sigmoid(W_a u + b_a), sigmoid(W_x u + b_x);  log a = -decay_strength softplus(Lambda) r
        theta = theta_0 + W_theta u;  h_t = a_t e^(i theta_t) h_{t-1} + sqrt(1 - a_t^2) i_t u_t;  y = W_o (h gelu(z))

    Source: the rotation: Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences
    (arXiv:2303.06349); the gates: De et al. 2024, Griffin (arXiv:2402.19427). theta_0 starts uniform between 0 and
    max_phase, W_theta at 0, so that the angles start as the LRU's.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand * d_model into heads of even width; W_a, W_x and W_theta act within each head.
        expand: width of the recurrence, in d_model.
        decay_strength: c of Griffin.
        max_phase: largest angle at the start, radians.
        backend: forces a backend of `rotlru_scan`.

    State: (h [B, expand * d_model],), pairs interleaved, float32.

    Raises:
        TypeError, ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        expand: float = 1.0,
        decay_strength: float = 8.0,
        max_phase: float = math.tau,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        head = head_width("expand", expand, d_model, num_heads)
        if head % 2:
            raise ValueError(f"expand: expected an even number of channels a head; got {head}")
        self.d_model, self.backend = d_model, backend
        self.decay_strength = check_positive("decay_strength", decay_strength)
        width, pairs = num_heads * head, head // 2
        self.splits = [pairs, pairs + head]
        self.in_proj = nn.Linear(d_model, 2 * width, bias=False)
        self.gates = HeadLinear(num_heads, head, 2 * head)
        self.gates.weight[..., -pairs:] = 0
        self.rate = initial_rate(num_heads * pairs, decay_strength)
        self.phase = mx.random.uniform(0, check_positive("max_phase", max_phase), (num_heads * pairs,))
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def __call__(self, x: mx.array, state: State | None = None) -> tuple[mx.array, State]:
        """x [B, L, d_model] -> (y [B, L, d_model], the state to continue from)."""
        self.check_input(x)
        (h,) = check_states(state, 1)
        u, z = mx.split(self.in_proj(x), 2, axis=-1)
        r, i, turn = (gate.flatten(-2).astype(mx.float32) for gate in mx.split(self.gates(u), self.splits, axis=-1))
        log_a = log_magnitude(r, self.rate, self.decay_strength)
        theta = self.phase + turn
        write = (mx.repeat(input_scale(log_a), 2, axis=-1) * mx.sigmoid(i) * u).astype(u.dtype)
        o, h = rotlru_scan_with_state(
            mx.exp(log_a), mx.cos(theta), mx.sin(theta), write, initial_state=h, backend=self.backend
        )
        return self.out_proj(o * nn.gelu(z)), (h,)
