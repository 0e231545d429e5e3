"""The mixer around the rotational linear recurrent unit: gated as Griffin's, on pairs that turn."""

import math

import torch
from torch import Tensor, nn

from holdfast.ops import rotlru
from holdfast.ops.gated_gelu import gated_gelu
from holdfast.ops.lru_gates import lru_gates
from holdfast.ops.lru_layer import lru_layer

from .check import check_input, check_positive, check_state, head_width, wide
from .lru_gates import HeadLinear, initial_rate
from .projection import Projection
from .step import Mixer

State = tuple[Tensor]


class RotLRU(Mixer):
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
        backend: forces a backend of `holdfast.rotlru`.

    State: (h [N, expand * d_model],), pairs interleaved, float32 (float64 for float64 inputs).

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(rotlru)

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
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        head = head_width("expand", expand, "d_model", d_model, num_heads)
        if head % 2:
            raise ValueError(f"expand: expected an even number of channels a head; got {head}")
        for name, value in (("decay_strength", decay_strength), ("max_phase", max_phase)):
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number; got {value}")
        self.decay_strength = decay_strength
        self.backend = backend
        self.width, pairs = num_heads * head, head // 2
        self.in_proj = Projection(d_model, 2 * self.width)
        self.gates = HeadLinear(num_heads, head, head + 2 * pairs)
        self.rate = nn.Parameter(initial_rate(num_heads * pairs, decay_strength))
        self.phase = nn.Parameter(torch.empty(num_heads * pairs).uniform_(0, max_phase))
        self.out_proj = Projection(self.width, d_model)
        with torch.no_grad():
            self.gates.weight[..., -pairs:] = 0

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        (h,) = check_state(state, [("h", (sequences, self.width), wide(x.dtype))])
        packed = self.in_proj(x)
        if self.op is not RotLRU.op:
            return self._in_parts(packed, h, cu_seqlens)
        gates = self.gates
        y, h = lru_layer(
            packed, gates.weight, gates.bias, self.rate, self.phase, h, self.decay_strength, cu_seqlens, self.backend
        )
        return self.out_proj(y), (h,)

    def _in_parts(self, packed: Tensor, h: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """`lru_layer` around an op that is not the layer's own."""
        u, z = packed.chunk(2, -1)
        a, write, theta = lru_gates(u, self.gates(u), self.gates.bias, self.rate, self.decay_strength, self.phase)
        o, h = self.op(a, theta, write, h, True, cu_seqlens, self.backend)
        return self.out_proj(gated_gelu(o, z)), (h,)
