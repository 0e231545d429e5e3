"""The mixer of gated linear attention."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.ops import gla
from holdfast.ops.gla_layer import gla_layer

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .in_projection import InProjection, join_projections
from .norm import GatedRMSNorm
from .projection import Projection
from .step import Mixer

State = tuple[Tensor]


class GLA(Mixer):
    """Gated linear attention: keys at half width, a low-rank decay of each key channel, swish output gate.

        q, k, v = W x;  g = logsigmoid(W_up W_down x + b) / gate_normalizer;  o = gla(q, k, v, g)
        y = W_o (rmsnorm(o) silu(W_g x))

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), section 4.4.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand_k * d_model and expand_v * d_model.
        expand_k, expand_v: width of keys and of values, in d_model.
        gate_rank: rank of the decay's projection.
        gate_normalizer: divides the log decay; 16 starts the decay near 1.
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.gla`.

    State: (S [N, H, K, V],), float32 (float64 for float64 inputs).

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(gla)

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
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        self.key_dim = head_width("expand_k", expand_k, "d_model", d_model, num_heads)
        self.value_dim = head_width("expand_v", expand_v, "d_model", d_model, num_heads)
        if not gate_normalizer > 0:
            raise ValueError(f"gate_normalizer: expected a positive number; got {gate_normalizer}")
        self.gate_normalizer = gate_normalizer
        self.backend = backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        # q, k, v, output gate, and the decay's at its rank
        self.widths = [keys, keys, values, values, check_positive("gate_rank", gate_rank)]
        self.in_proj = InProjection(d_model, self.widths)
        self.decay_up = nn.Linear(gate_rank, keys)
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        join_projections(self, state_dict, prefix, ("in_proj", "decay_down"))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, State | None]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Without output_final_state
        None is returned in the state's place. Raises ValueError or TypeError for x, a state or cu_seqlens of the wrong
        shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        shape = (sequences, self.num_heads, self.key_dim, self.value_dim)
        (S,) = check_state(state, [("S", shape, wide(x.dtype))])
        mix = self._mix if self.op is GLA.op else self._mix_in_parts
        y, S = mix(self.in_proj(x), S, cu_seqlens)
        return self.out_proj(y), (S,) if output_final_state else None

    def _mix(self, packed: Tensor, S: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """y [B, T, expand_v * d_model] before the last projection, and the state."""
        parameters = (self.decay_up.weight, self.decay_up.bias, self.norm.weight)
        numbers = (self.num_heads, float(self.gate_normalizer), self.norm.eps)
        return gla_layer(packed, *parameters, S, *numbers, cu_seqlens, self.backend)

    def _mix_in_parts(self, packed: Tensor, S: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_mix` around an op that is not the layer's own."""
        *parts, down, _ = packed.split([*self.widths, packed.shape[2] - sum(self.widths)], -1)
        q, k, v, gate = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        decay = self.decay_up(down).unflatten(-1, (self.num_heads, -1))
        g = F.logsigmoid(decay.to(wide(packed.dtype))) / self.gate_normalizer
        o, S = self.op(q, k, v, g, None, S, True, cu_seqlens, self.backend)
        return self.norm(o, gate).flatten(-2), S

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.gla(self, x, state)
