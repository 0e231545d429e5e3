"""The mixer of Kimi Linear: Kimi Delta Attention."""

from typing import Any

from torch import Tensor, nn

from holdfast.ops import kda
from holdfast.ops.kda_layer import kda_layer
from holdfast.recurrences.scalars import number

from .check import check_positive
from .decay_init import initial_A_log, initial_dt_bias
from .delta_mixer import DeltaMixer
from .fla_names import take_fla_names
from .in_projection import InProjection
from .norm import GatedRMSNorm
from .projection import Projection
from .short_convolution import ShortConvolution

State = tuple[Tensor, Tensor]
# of fla's layer: rows of in_proj, and what has another name alone
_ROWS = ("q_proj", "k_proj", "v_proj", "f_proj.0", "g_proj.0", "b_proj")
_RENAMED = {"f_proj.1.weight": "decay_up.weight", "g_proj.1.weight": "gate_up.weight", "g_proj.1.bias": "gate_up.bias"}
_RENAMED |= {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}


class KDA(DeltaMixer):
    """Kimi Delta Attention: Gated DeltaNet with a low-rank decay of each key channel and a low-rank output gate.

        q, k, v = conv(W x);  beta = sigmoid(W_b x);  g = -exp(A_log) softplus(F_2 F_1 x + dt_bias)
        o = kda(q / |q|, k / |k|, v, g, beta);  y = W_o (rmsnorm(o) sigmoid(G_2 G_1 x + b))

    Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692), section 4. Checkpoints of KimiDeltaAttention in
    flash-linear-attention load as they are: all that is made of x is one projection here, in_proj, F_2 is decay_up and
    G_2 gate_up. Starting values of the decay are those of `Mamba2`.

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

    State: (S [N, num_v_heads, K, V], tail [N, conv_width - 1, channels of q, k and v]), float32 (float64 for float64
    inputs): the matrix state and the convolution's last inputs.

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
        # q, k, v, decay and output gate at their rank, b
        self.widths = [keys, keys, values, rank, rank, self.num_v_heads]
        self.in_proj = InProjection(d_model, self.widths)
        self.conv = ShortConvolution(2 * keys + values, check_positive("conv_width", conv_width))
        self.decay_up = Projection(rank, decays)
        A_log = initial_A_log(self.num_v_heads)
        self.A_log = nn.Parameter(A_log if lower_bound is None else A_log.zero_())
        self.dt_bias = nn.Parameter(initial_dt_bias(decays))
        self.gate_up = nn.Linear(rank, values)
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps, activation="sigmoid")
        self.out_proj = Projection(values, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        take_fla_names(self, state_dict, prefix, _ROWS, _RENAMED)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        S, tail = self.checked_state(x, state, cu_seqlens)
        packed = self.in_proj(x)
        if self.op is not KDA.op:
            return self._in_parts(packed, S, tail, cu_seqlens)
        y, S, tail = kda_layer(
            packed,
            self.conv.weight,
            self.norm.weight,
            self.decay_up.weight,
            self.gate_up.weight,
            self.gate_up.bias,
            self.A_log,
            self.dt_bias.unflatten(0, (self.num_v_heads, -1)),
            S,
            tail,
            self.num_heads,
            self.key_dim,
            self.lower_bound,
            self.allow_neg_eigval,
            self.norm.eps,
            cu_seqlens,
            self.backend,
        )
        return self.out_proj(y), (S, tail)

    def _in_parts(
        self, packed: Tensor, S: Tensor | None, tail: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        """`kda_layer` around an op that is not the layer's own."""
        keys, _, values, *rest = self.widths
        qkv, f, g, b, _ = packed.split([2 * keys + values, *rest, packed.shape[2] - sum(self.widths)], -1)
        qkv, tail = self.conv(qkv, tail, cu_seqlens)
        q, k, v = qkv.split(self.widths[:3], -1)
        o, S = self.op(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_v_heads, -1)),
            self.decay_up(f).unflatten(-1, (self.num_v_heads, -1)),
            b,
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
        gate = self.gate_up(g).unflatten(-1, (self.num_v_heads, -1))
        return self.out_proj(self.norm(o, gate).flatten(-2)), (S, tail)
