"""The mixer of Gated DeltaNet."""

from typing import Any

from torch import Tensor, nn

from holdfast.ops import gated_delta_rule
from holdfast.ops.delta_layer import delta_layer

from . import step
from .check import check_positive
from .decay_init import initial_A_log, initial_dt_bias
from .delta_mixer import DeltaMixer
from .in_projection import InProjection, join_projections
from .norm import GatedRMSNorm
from .projection import Projection
from .short_convolution import ShortConvolution

State = tuple[Tensor, Tensor]


class GatedDeltaNet(DeltaMixer):
    """Gated DeltaNet: DeltaNet with Mamba-2's decay and a swish output gate.

        q, k, v = conv(W x);  beta = sigmoid(W_b x);  g = -exp(A_log) softplus(W_a x + dt_bias)
        o = gated_delta_rule(q / |q|, k / |k|, v, g, beta);  y = W_o (rmsnorm(o) silu(W_g x))

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), section 3.4; starting values of the
    decay as in `Mamba2`.

    Args:
        d_model: width of inputs and outputs.
        num_heads: heads of queries and keys.
        head_dim: channels of a query and a key; by default d_model / num_heads.
        num_v_heads: heads of values, decay and state, a multiple of num_heads; by default num_heads.
        expand_v: channels of a value, in head_dim.
        conv_width: taps of the short convolution.
        allow_neg_eigval: doubles beta, so that a step may reflect the state (Grazzi et al. 2024, arXiv:2411.12537).
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.gated_delta_rule`.

    State: (S [N, num_v_heads, K, V], tail [N, conv_width - 1, 2 * num_heads * K + num_v_heads * V]), float32 (float64
    for float64 inputs): the matrix state and the convolution's last inputs.

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(gated_delta_rule)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        num_v_heads: int | None = None,
        expand_v: float = 2.0,
        conv_width: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        keys, values = self.set_heads(d_model, num_heads, head_dim, num_v_heads, expand_v)
        self.allow_neg_eigval = allow_neg_eigval
        self.backend = backend
        # q, k, v, output gate, a, b
        self.widths = [keys, keys, values, values, self.num_v_heads, self.num_v_heads]
        self.in_proj = InProjection(d_model, self.widths)
        self.conv = ShortConvolution(2 * keys + values, check_positive("conv_width", conv_width))
        self.A_log = nn.Parameter(initial_A_log(self.num_v_heads))
        self.dt_bias = nn.Parameter(initial_dt_bias(self.num_v_heads))
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        join_projections(self, state_dict, prefix, ("qkv_proj", "gate_proj", "decay_beta_proj"))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        S, tail = self.checked_state(x, state, cu_seqlens)
        packed = self.in_proj(x)
        if self.op is not GatedDeltaNet.op:
            return self._in_parts(packed, S, tail, cu_seqlens)
        y, S, tail = delta_layer(
            packed,
            self.conv.weight,
            self.norm.weight,
            self.A_log,
            self.dt_bias,
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
        keys, _, values, *_ = self.widths
        qkv, gate, a, b, _ = packed.split([2 * keys + values, *self.widths[3:], packed.shape[2] - sum(self.widths)], -1)
        qkv, tail = self.conv(qkv, tail, cu_seqlens)
        q, k, v = qkv.split(self.widths[:3], -1)
        q, k = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k))
        v, gate = (part.unflatten(-1, (self.num_v_heads, -1)) for part in (v, gate))
        o, S = self.op(
            q,
            k,
            v,
            a,
            b,
            initial_state=S,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        return self.out_proj(self.norm(o, gate).flatten(-2)), (S, tail)

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.gated_delta_net(self, x, state)
