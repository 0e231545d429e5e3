"""The mixer of Gated DeltaProduct."""

from typing import Any

from torch import Tensor, nn

from holdfast.ops import gated_delta_product

from .check import check_positive
from .decay_init import initial_A_log, initial_dt_bias
from .delta_mixer import DeltaMixer
from .fla_names import take_fla_names
from .in_projection import InProjection
from .norm import GatedRMSNorm
from .projection import Projection
from .short_convolution import ShortConvolution

State = tuple[Tensor, Tensor]
# of fla's layer: rows of in_proj, without a decay the first of them, and what has another name alone
_ROWS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_RENAMED = {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}


class GatedDeltaProduct(DeltaMixer):
    """Gated DeltaProduct: Gated DeltaNet with several writes a token.

        q, k_1 .. k_n, v_1 .. v_n = conv(W x);  beta = 2 sigmoid(W_b x);  g = -exp(A_log) softplus(W_a x + dt_bias)
        o = gated_delta_product(q / |q|, k / |k|, v, g, beta);  y = W_o (rmsnorm(o) silu(W_g x))

    Source: Siems et al. 2025, DeltaProduct (arXiv:2502.10297). Checkpoints of GatedDeltaProduct in
    flash-linear-attention load as they are: all that is made of x is one projection here, in_proj. Starting values of
    the decay are those of `Mamba2`.

    Args:
        d_model: width of inputs and outputs.
        num_heads: heads of queries and keys.
        head_dim: channels of a query and a key; by default d_model / num_heads.
        num_v_heads: heads of values, decay and state, a multiple of num_heads; by default num_heads.
        expand_v: channels of a value, in head_dim.
        num_householder: n, the writes of a token.
        forget_gate: whether the state decays.
        conv_width: taps of the short convolutions.
        allow_neg_eigval: doubles beta, so that a write may reflect the state (Grazzi et al. 2024, arXiv:2411.12537).
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.gated_delta_product`.

    State: (S [N, num_v_heads, K, V], tail [N, conv_width - 1, channels of q, all k and all v]), float32 (float64 for
    float64 inputs): the matrix state and the convolution's last inputs.

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place
    op = staticmethod(gated_delta_product)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        num_v_heads: int | None = None,
        expand_v: float = 2.0,
        num_householder: int = 2,
        forget_gate: bool = True,
        conv_width: int = 4,
        allow_neg_eigval: bool = True,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        keys, values = self.set_heads(d_model, num_heads, head_dim, num_v_heads, expand_v)
        self.num_householder = check_positive("num_householder", num_householder)
        self.forget_gate, self.allow_neg_eigval, self.backend = forget_gate, allow_neg_eigval, backend
        channels = keys + num_householder * (keys + values)
        # q, k and v, output gate, b, a
        widths = [channels, values, num_householder * self.num_v_heads, self.num_v_heads if forget_gate else 0]
        self.in_proj = InProjection(d_model, widths)
        self.conv = ShortConvolution(channels, check_positive("conv_width", conv_width))
        if forget_gate:
            self.A_log = nn.Parameter(initial_A_log(self.num_v_heads))
            self.dt_bias = nn.Parameter(initial_dt_bias(self.num_v_heads))
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        take_fla_names(self, state_dict, prefix, _ROWS if self.forget_gate else _ROWS[:-1], _RENAMED)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        S, tail = self.checked_state(x, state, cu_seqlens)
        n, keys, values = self.num_householder, self.num_heads * self.key_dim, self.num_v_heads * self.value_dim
        packed = self.in_proj(x)
        sizes = [self.conv.channels, values, n * self.num_v_heads]
        qkv, gate, b, a = packed.split([*sizes, packed.shape[2] - sum(sizes)], -1)
        qkv, tail = self.conv(qkv, tail, cu_seqlens)
        q, k, v = qkv.split([keys, n * keys, n * values], -1)
        o, S = self.op(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (n, self.num_heads, -1)),
            v.unflatten(-1, (n, self.num_v_heads, -1)),
            a[..., : self.num_v_heads] if self.forget_gate else None,
            b.unflatten(-1, (n, -1)),
            initial_state=S,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            A_log=self.A_log if self.forget_gate else None,
            dt_bias=self.dt_bias if self.forget_gate else None,
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        y = self.norm(o, gate.unflatten(-1, (self.num_v_heads, -1)))
        return self.out_proj(y.flatten(-2)), (S, tail)
