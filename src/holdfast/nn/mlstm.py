"""The mixer of the matrix LSTM of xLSTM."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.ops import mlstm
from holdfast.ops.mlstm_layer import mlstm_layer
from holdfast.ops.soft_cap import soft_cap
from holdfast.recurrences.mlstm import Gating

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .in_projection import InProjection, join_projections
from .norm import HeadLayerNorm
from .projection import Projection
from .step import Mixer

State = tuple[Tensor, Tensor, Tensor]


class MLSTM(Mixer):
    """xLSTM's matrix memory: queries and keys at half width, an input and a forget gate a head, sigmoid output gate.

        q, k, v = W x;  i, f = cap(W_if x + b);  h = mlstm(q, k, v, i, f);  y = W_o (sigmoid(W_g x) layernorm(h))

    with cap(a) = c tanh(a / c). Layer and starting values: Beck et al. 2025, xLSTM 7B (arXiv:2503.13427), section 3:
    gates capped at 15, b_i = -10, so that nothing is written until the gate learns to open; b_f from 3 to 6 over the
    heads, as in Beck et al. 2024 (arXiv:2405.04517). b_i = -10 makes h about 5e-5, which float16 hardly holds.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand_k * d_model and expand_v * d_model.
        expand_k, expand_v: width of queries and keys and of values, in d_model.
        gating: "exp" or "sigmoid" input gate.
        normalize: whether to divide by the normaliser; False only with gating="sigmoid".
        gate_soft_cap: c, or None for gates without a cap.
        input_gate_bias: b_i.
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.mlstm`.

    State: (C [N, H, K, V], n [N, H, K], m [N, H]), float32 (float64 for float64 inputs).

    Raises:
        ValueError: for sizes that are not positive or do not divide, or an unknown gating, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(mlstm)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gating: Gating = "exp",
        normalize: bool = True,
        gate_soft_cap: float | None = 15.0,
        input_gate_bias: float = -10.0,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        self.key_dim = head_width("expand_k", expand_k, "d_model", d_model, num_heads)
        self.value_dim = head_width("expand_v", expand_v, "d_model", d_model, num_heads)
        if gating not in ("exp", "sigmoid"):
            raise ValueError(f"gating: expected 'exp' or 'sigmoid'; got {gating!r}")
        if gating == "exp" and not normalize:
            raise ValueError("normalize: expected True with gating='exp', whose states are scaled; got False")
        if gate_soft_cap is not None and not gate_soft_cap > 0:
            raise ValueError(f"gate_soft_cap: expected a positive number or None; got {gate_soft_cap}")
        self.gating, self.normalize, self.gate_soft_cap = gating, normalize, gate_soft_cap
        self.backend = backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        # q, k, v, output gate, and i and f
        self.widths = [keys, keys, values, values, 2 * num_heads]
        self.in_proj = InProjection(d_model, self.widths)
        self.gate_bias = nn.Parameter(
            torch.cat([torch.full((num_heads,), float(input_gate_bias)), torch.linspace(3, 6, num_heads)])
        )
        self.norm = HeadLayerNorm(num_heads, self.value_dim, norm_eps)
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        join_projections(self, state_dict, prefix, ("in_proj", "gate_proj"))
        if (bias := state_dict.pop(f"{prefix}gate_proj.bias", None)) is not None:
            state_dict[f"{prefix}gate_bias"] = bias
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        dtype = wide(x.dtype)
        shape = (sequences, self.num_heads, self.key_dim, self.value_dim)
        expected = [("C", shape, dtype), ("n", shape[:3], dtype), ("m", shape[:2], dtype)]
        C, n, m = check_state(state, expected)
        packed = self.in_proj(x)
        given = None if C is None else (C, n, m)
        if self.op is not MLSTM.op:
            return self._in_parts(packed, given, cu_seqlens)
        y, final = mlstm_layer(
            packed,
            self.gate_bias,
            self.norm.weight,
            given,
            self.key_dim,
            self.gating,
            self.normalize,
            self.gate_soft_cap,
            self.norm.eps,
            cu_seqlens,
            self.backend,
        )
        return self.out_proj(y), final

    def _in_parts(self, packed: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """`mlstm_layer` around an op that is not the layer's own."""
        *parts, gates, _ = packed.split([*self.widths, packed.shape[2] - sum(self.widths)], -1)
        q, k, v, gate = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        gates = gates + self.gate_bias.to(wide(packed.dtype))
        if self.gate_soft_cap is not None:
            gates = soft_cap(gates, self.gate_soft_cap)
        i, f = gates.chunk(2, -1)
        h, final = self.op(
            q,
            k,
            v,
            i,
            f,
            self.gating,
            self.normalize,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return self.out_proj(self.norm(h, gate).flatten(-2)), final

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.mlstm(self, x, state)
