"""The mixer of gated linear attention."""

import mlx.core as mx
import mlx.nn as nn

from ..check import check_count
from ..gla import gla_scan_with_state
from .layer import Layer, check_positive, check_states, head_width

State = tuple[mx.array]


class GLA(Layer):
    """Gated linear attention: keys at half width, a low-rank decay of each key channel, swish output gate.

        q, k, v = W x;  log gates = logsigmoid(W_up W_down x + b) / gate_normalizer
        o = gla_scan(q / sqrt(K), k, v, gates);  y = W_o (rmsnorm(o) silu(W_g x))

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), section 4.4.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand_k * d_model and expand_v * d_model.
        expand_k, expand_v: width of keys and of values, in d_model.
        gate_rank: rank of the decay's projection.
        gate_normalizer: divides the log decay; 16 starts the decay near 1.
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `gla_scan`.

    State: (S [B, H, K, V],), float32.

    Raises:
        TypeError, ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.key_dim = head_width("expand_k", expand_k, d_model, num_heads)
        self.value_dim = head_width("expand_v", expand_v, d_model, num_heads)
        self.d_model, self.num_heads, self.backend = d_model, num_heads, backend
        self.gate_normalizer = check_positive("gate_normalizer", gate_normalizer)
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        self.splits = [keys, 2 * keys, 2 * keys + values]
        self.in_proj = nn.Linear(d_model, 2 * keys + 2 * values, bias=False)
        self.decay_down = nn.Linear(d_model, check_count("gate_rank", gate_rank), bias=False)
        self.decay_up = nn.Linear(gate_rank, keys)
        self.norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = nn.Linear(values, d_model, bias=False)

    def __call__(self, x: mx.array, state: State | None = None) -> tuple[mx.array, State]:
        """x [B, L, d_model] -> (y [B, L, d_model], the state to continue from)."""
        self.check_input(x)
        (S,) = check_states(state, 1)
        parts = mx.split(self.in_proj(x), self.splits, axis=-1)
        q, k, v, gate = (mx.unflatten(part, -1, (self.num_heads, part.shape[-1] // self.num_heads)) for part in parts)
        decay = self.decay_up(self.decay_down(x)).reshape(q.shape).astype(mx.float32)
        gates = mx.exp(nn.log_sigmoid(decay) / self.gate_normalizer)
        o, S = gla_scan_with_state(q * self.key_dim**-0.5, k, v, gates, initial_state=S, backend=self.backend)
        y = self.norm(o) * nn.silu(gate)
        return self.out_proj(y.flatten(-2)), (S,)
