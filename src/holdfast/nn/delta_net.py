"""The mixer of DeltaNet."""

from typing import Any

from torch import Tensor

from holdfast.ops import delta_rule
from holdfast.ops.delta_layer import delta_layer

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .in_projection import InProjection, join_projections
from .norm import GatedRMSNorm
from .projection import Projection
from .short_convolution import ShortConvolution
from .step import Mixer

State = tuple[Tensor, Tensor]


class DeltaNet(Mixer):
    """DeltaNet: short convolutions on q, k and v, keys of length 1, and a write strength a head.

        q, k, v = conv(W x);  beta = sigmoid(W_b x);  o = delta_rule(q / |q|, k / |k|, v, beta);  y = W_o rmsnorm(o)

    Source: Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule (arXiv:2406.06484), section 3.4.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand_k * d_model and expand_v * d_model.
        expand_k, expand_v: width of keys and of values, in d_model.
        conv_width: taps of the short convolution.
        allow_neg_eigval: doubles beta, so that a step may reflect the state, which tracking parity needs (Grazzi et al.
            2024, arXiv:2411.12537).
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.delta_rule`.

    State: (S [N, H, K, V], tail [N, conv_width - 1, H * (2 K + V)]), float32 (float64 for float64 inputs): the matrix
    state and the convolution's last inputs.

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(delta_rule)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        conv_width: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        self.key_dim = head_width("expand_k", expand_k, "d_model", d_model, num_heads)
        self.value_dim = head_width("expand_v", expand_v, "d_model", d_model, num_heads)
        self.allow_neg_eigval = allow_neg_eigval
        self.backend = backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        # q, k, v, b
        self.widths = [keys, keys, values, num_heads]
        self.in_proj = InProjection(d_model, self.widths)
        self.conv = ShortConvolution(2 * keys + values, check_positive("conv_width", conv_width))
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        join_projections(self, state_dict, prefix, ("qkv_proj", "beta_proj"))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        dtype = wide(x.dtype)
        shape = (sequences, self.num_heads, self.key_dim, self.value_dim)
        tail_shape = (sequences, self.conv.width - 1, self.conv.channels)
        S, tail = check_state(state, [("S", shape, dtype), ("tail", tail_shape, dtype)])
        packed = self.in_proj(x)
        if self.op is not DeltaNet.op:
            return self._in_parts(packed, S, tail, cu_seqlens)
        y, S, tail = delta_layer(
            packed,
            self.conv.weight,
            self.norm.weight,
            None,
            None,
            S,
            tail,
            self.num_heads,
            self.key_dim,
            self.allow_neg_eigval,
            self.norm.eps,
            cu_seqlens,
            self.backend,
        )
        return self.out_proj(y), (S, tail)

    def _in_parts(
        self, packed: Tensor, S: Tensor | None, tail: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        """`delta_layer` around an op that is not the layer's own."""
        keys, _, values, heads = self.widths
        qkv, b, _ = packed.split([2 * keys + values, heads, packed.shape[2] - sum(self.widths)], -1)
        qkv, tail = self.conv(qkv, tail, cu_seqlens)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv.split(self.widths[:3], -1))
        o, S = self.op(
            q,
            k,
            v,
            b,
            initial_state=S,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        return self.out_proj(self.norm(o).flatten(-2)), (S, tail)

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.gated_delta_net(self, x, state)
