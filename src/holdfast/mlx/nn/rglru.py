"""The mixer of Griffin: a real-gated linear recurrent unit beside a GeLU branch."""

import mlx.core as mx
import mlx.nn as nn

from ..rglru import rglru_scan_with_state
from .gates import HeadLinear, initial_rate, input_scale, log_magnitude
from .layer import Layer, check_positive, check_states, head_width

State = tuple[mx.array]


class RGLRU(Layer):
    """Griffin's recurrent block, without its short convolution:

        u, z = W x;  r, i = sigmoid(W_a u + b_a), sigmoid(W_x u + b_x);  log a = -decay_strength softplus(Lambda) r
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t;  y = W_o (h gelu(z))

    Source: De et al. 2024, Griffin (arXiv:2402.19427), section 2.4. Lambda starts such that a at r = 1 is uniform
    between 0.9 and 0.999.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand * d_model; W_a and W_x act within each head.
        expand: width of the recurrence, in d_model.
        decay_strength: c of the paper.
        backend: forces a backend of `rglru_scan`.

    State: (h [B, expand * d_model],), float32.

    Raises:
        TypeError, ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        expand: float = 1.0,
        decay_strength: float = 8.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        head = head_width("expand", expand, d_model, num_heads)
        self.d_model, self.backend = d_model, backend
        self.decay_strength = check_positive("decay_strength", decay_strength)
        width = num_heads * head
        self.in_proj = nn.Linear(d_model, 2 * width, bias=False)
        self.gates = HeadLinear(num_heads, head, 2 * head)
        self.rate = initial_rate(width, decay_strength)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def __call__(self, x: mx.array, state: State | None = None) -> tuple[mx.array, State]:
        """x [B, L, d_model] -> (y [B, L, d_model], the state to continue from)."""
        self.check_input(x)
        (h,) = check_states(state, 1)
        u, z = mx.split(self.in_proj(x), 2, axis=-1)
        r, i = (gate.flatten(-2) for gate in mx.split(self.gates(u), 2, axis=-1))
        log_a = log_magnitude(r, self.rate, self.decay_strength)
        write = (input_scale(log_a) * mx.sigmoid(i.astype(mx.float32)) * u).astype(u.dtype)
        o, h = rglru_scan_with_state(mx.exp(log_a), write, initial_state=h, backend=self.backend)
        return self.out_proj(o * nn.gelu(z)), (h,)
