"""The mixer of Griffin: a real-gated linear recurrent unit beside a GeLU branch."""

from torch import Tensor, nn

from holdfast.ops import rglru
from holdfast.ops.gated_gelu import gated_gelu
from holdfast.ops.lru_gates import lru_gates
from holdfast.ops.lru_layer import lru_layer

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .lru_gates import HeadLinear, initial_rate
from .projection import Projection
from .step import Mixer

State = tuple[Tensor]


class RGLRU(Mixer):
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
        backend: forces a backend of `holdfast.rglru`.

    State: (h [N, expand * d_model],), float32 (float64 for float64 inputs).

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(rglru)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        expand: float = 1.0,
        decay_strength: float = 8.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        head = head_width("expand", expand, "d_model", d_model, num_heads)
        if not decay_strength > 0:
            raise ValueError(f"decay_strength: expected a positive number; got {decay_strength}")
        self.decay_strength = decay_strength
        self.backend = backend
        self.width = num_heads * head
        self.in_proj = Projection(d_model, 2 * self.width)
        self.gates = HeadLinear(num_heads, head, 2 * head)
        self.rate = nn.Parameter(initial_rate(self.width, decay_strength))
        self.out_proj = Projection(self.width, d_model)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        (h,) = check_state(state, [("h", (sequences, self.width), wide(x.dtype))])
        packed = self.in_proj(x)
        if self.op is not RGLRU.op:
            return self._in_parts(packed, h, cu_seqlens)
        gates = self.gates
        y, h = lru_layer(
            packed, gates.weight, gates.bias, self.rate, None, h, self.decay_strength, cu_seqlens, self.backend
        )
        return self.out_proj(y), (h,)

    def _in_parts(self, packed: Tensor, h: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """`lru_layer` around an op that is not the layer's own."""
        u, z = packed.chunk(2, -1)
        a, write, _ = lru_gates(u, self.gates(u), self.gates.bias, self.rate, self.decay_strength)
        o, h = self.op(a, write, h, True, cu_seqlens, self.backend)
        return self.out_proj(gated_gelu(o, z)), (h,)

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.rglru(self, x, state)
