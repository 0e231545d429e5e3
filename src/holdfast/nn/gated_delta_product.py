"""The mixer of Gated DeltaProduct."""

from torch import Tensor, nn

from holdfast.ops import gated_delta_product

from .check import check_input, check_positive, check_state, wide
from .decay_init import initial_A_log, initial_dt_bias
from .delta_mixer import DeltaMixer
from .norm import GatedRMSNorm
from .projection import Projection
from .separate_qkv import add_qkv, qkv_of, tails_of

State = tuple[Tensor, Tensor, Tensor, Tensor]


class GatedDeltaProduct(DeltaMixer):
    """Gated DeltaProduct: Gated DeltaNet with several writes a token.

        q, k_1 .. k_n, v_1 .. v_n = conv(W x);  beta = 2 sigmoid(W_b x);  g = -exp(A_log) softplus(W_a x + dt_bias)
        o = gated_delta_product(q / |q|, k / |k|, v, g, beta);  y = W_o (rmsnorm(o) silu(W_g x))

    Source: Siems et al. 2025, DeltaProduct (arXiv:2502.10297). Parameters have the names and shapes of
    GatedDeltaProduct in flash-linear-attention, whose checkpoints load as they are; starting values of the decay are
    those of `Mamba2`.

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

    State: (S [N, num_v_heads, K, V], q_tail [N, conv_width - 1, num_heads * K], k_tail [N, conv_width - 1, n *
    num_heads * K], v_tail [N, conv_width - 1, n * num_v_heads * V]), float32 (float64 for float64 inputs): the matrix
    state and the convolutions' last inputs.

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
        add_qkv(self, d_model, (keys, num_householder * keys, num_householder * values), conv_width)
        self.b_proj = Projection(d_model, num_householder * self.num_v_heads)
        if forget_gate:
            self.a_proj = Projection(d_model, self.num_v_heads)
            self.A_log = nn.Parameter(initial_A_log(self.num_v_heads))
            self.dt_bias = nn.Parameter(initial_dt_bias(self.num_v_heads))
        self.g_proj = Projection(d_model, values)
        self.o_norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.o_proj = Projection(values, d_model)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        dtype = wide(x.dtype)
        shape = (sequences, self.num_v_heads, self.key_dim, self.value_dim)
        S, *tails = check_state(state, [("S", shape, dtype), *tails_of(self, sequences, dtype)])
        (q, k, v), tails = qkv_of(self, x, tails, cu_seqlens)
        o, S = self.op(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_householder, self.num_heads, -1)),
            v.unflatten(-1, (self.num_householder, self.num_v_heads, -1)),
            self.a_proj(x) if self.forget_gate else None,
            self.b_proj(x).unflatten(-1, (self.num_householder, -1)),
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
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, -1))
        return self.o_proj(self.o_norm(o, gate).flatten(-2)), (S, *tails)
