"""The mixer of Kimi Linear: Kimi Delta Attention."""

from torch import Tensor, nn

from holdfast.ops import kda
from holdfast.recurrences.scalars import number

from .check import check_input, check_state, wide
from .decay_init import initial_A_log, initial_dt_bias
from .delta_mixer import DeltaMixer
from .norm import GatedRMSNorm
from .projection import Projection
from .separate_qkv import add_qkv, qkv_of, tails_of

State = tuple[Tensor, Tensor, Tensor, Tensor]


class KDA(DeltaMixer):
    """Kimi Delta Attention: Gated DeltaNet with a low-rank decay of each key channel and a low-rank output gate.

        q, k, v = conv(W x);  beta = sigmoid(W_b x);  g = -exp(A_log) softplus(F_2 F_1 x + dt_bias)
        o = kda(q / |q|, k / |k|, v, g, beta);  y = W_o (rmsnorm(o) sigmoid(G_2 G_1 x + b))

    Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692), section 4. Parameters have the names and shapes of
    KimiDeltaAttention in flash-linear-attention, whose checkpoints load as they are; starting values of the decay are
    those of `Mamba2`.

    Args:
        d_model: width of inputs and outputs.
        num_heads: heads of queries and keys.
        head_dim: channels of a query and a key; by default d_model / num_heads.
        num_v_heads: heads of values, decay and state, a multiple of num_heads; by default num_heads.
        expand_v: channels of a value, in head_dim; the rank of the decay and of the output gate is the same.
        conv_width: taps of the short convolutions.
        lower_bound: a number below 0, the least log decay: g = lower_bound sigmoid(exp(A_log) (F_2 F_1 x + dt_bias))
            instead, with A_log starting at 0. None for no bound.
        allow_neg_eigval: doubles beta, so that a step may reflect the state (Grazzi et al. 2024, arXiv:2411.12537).
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.kda`.

    State: (S [N, num_v_heads, K, V], q_tail and k_tail [N, conv_width - 1, num_heads * K], v_tail [N, conv_width - 1,
    num_v_heads * V]), float32 (float64 for float64 inputs): the matrix state and the convolutions' last inputs.

    Raises:
        ValueError: for sizes that are not positive or do not divide and for a lower_bound that is not below 0, named in
            the message; TypeError for a lower_bound that is no number.
    """

    # holdfast.parallel puts the same over several ranks in its place
    op = staticmethod(kda)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        conv_width: int = 4,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        keys, values = self.set_heads(d_model, num_heads, head_dim, num_v_heads, expand_v)
        self.lower_bound = None if lower_bound is None else number("lower_bound", lower_bound)
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise ValueError(f"lower_bound: expected a number below 0, the least log decay; got {lower_bound}")
        self.allow_neg_eigval = allow_neg_eigval
        self.backend = backend
        rank, decays = self.value_dim, self.num_v_heads * self.key_dim
        add_qkv(self, d_model, (keys, keys, values), conv_width)
        self.f_proj = nn.Sequential(Projection(d_model, rank), Projection(rank, decays))
        self.b_proj = Projection(d_model, self.num_v_heads)
        A_log = initial_A_log(self.num_v_heads)
        self.A_log = nn.Parameter(A_log if lower_bound is None else A_log.zero_())
        self.dt_bias = nn.Parameter(initial_dt_bias(decays))
        self.g_proj = nn.Sequential(Projection(d_model, rank), nn.Linear(rank, values))
        self.o_norm = GatedRMSNorm(self.value_dim, eps=norm_eps, activation="sigmoid")
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
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_v_heads, -1)),
            self.f_proj(x).unflatten(-1, (self.num_v_heads, -1)),
            self.b_proj(x),
            initial_state=S,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            A_log=self.A_log,
            dt_bias=self.dt_bias.unflatten(0, (self.num_v_heads, -1)),
            lower_bound=self.lower_bound,
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, -1))
        return self.o_proj(self.o_norm(o, gate).flatten(-2)), (S, *tails)
