"""What every backend of a layer's step is given. Shapes as a layer's projections leave them, for one token."""

from typing import NamedTuple

from torch import Tensor


class ConvStep(NamedTuple):
    """DeltaNet and Gated DeltaNet, or without beta Mamba-2.

        x = silu(conv(x));  q, k, v = x (delta rule: q / |q|, k / |k|),  v, k, q = x (Mamba-2: its x, B, C)
        dt = softplus(a + dt_bias);  S' = exp(-exp(A_log) dt) S
        delta rule: S = S' + largest sigmoid(beta) k (v - S'^T k)^T;  o = S^T q / sqrt(K);  y = rmsnorm(o) silu(gate)
        Mamba-2:    S = S' + dt k v^T;  o = (S^T q + D v) silu(gate);  y = rmsnorm(o)

    The norm is over each head's V, or over each of the groups that norm_weight [G, N] has.
    """

    x: Tensor  # [B, 1, C]
    tail: Tensor  # [B, L, C], L >= W - 1: the last inputs of the convolution, oldest first; updated
    state: Tensor  # [B, H, K, V], V side by side; updated
    conv_weight: Tensor  # [C, W]
    conv_bias: Tensor | None  # [C]
    a: Tensor | None  # [B, 1, H]; None for no decay, of a delta rule
    beta: Tensor | None  # [B, 1, H]
    A_log: Tensor | None  # [H], as a
    dt_bias: Tensor | None  # [H], as a
    D: Tensor | None  # [H]
    gate: Tensor | None  # [B, 1, H * V]
    norm_weight: Tensor  # [V] or [G, H * V / G]
    heads: int  # of q and k
    largest: float  # 1, or 2 for negative eigenvalues
    norm_eps: float

    @property
    def delta(self) -> bool:
        return self.beta is not None


class RetentionStep(NamedTuple):
    """GLA, or with a position RetNet.

        q, k, v = x;  S = decay S + k v^T;  o = S^T q / sqrt(K);  y = rmsnorm(o) silu(gate)

    GLA: decay = sigmoid(a)^(1 / normalizer). RetNet: 1 - 2^(-5 - h), and q and k are rotated, pair (j, j + K/2) by
    position base^(-2 j / K) radians.
    """

    x: Tensor  # [B, 1, H * (2 K + V)]
    state: Tensor  # [B, H, K, V], V side by side; updated
    a: Tensor | None  # [B, 1, H * K]
    position: Tensor | None  # [B] int64, contiguous; one more afterwards
    gate: Tensor | None  # [B, 1, H * V]
    norm_weight: Tensor  # [V]
    normalizer: float  # with a
    base: float  # with a position
    norm_eps: float


class MLSTMStep(NamedTuple):
    """mLSTM: y = sigmoid(gate) layernorm(h), h as `recurrences.mlstm` has it, of gates cap tanh(pre / cap)."""

    x: Tensor  # [B, 1, H * (2 K + V)]
    gates: Tensor  # [B, 1, 2 H]: i, f
    C: Tensor  # [B, H, K, V], V side by side; updated
    n: Tensor  # [B, H, K]; updated
    m: Tensor  # [B, H], H side by side; updated
    gate: Tensor  # [B, 1, H * V]
    norm_weight: Tensor  # [H, V]
    exponential: bool
    normalize: bool
    cap: float  # 0 for none
    norm_eps: float
    eps: float = 1e-6


class RGLRUStep(NamedTuple):
    """RG-LRU: y = h gelu(z), log a = -decay_scale softplus(rate) sigmoid(r), h = a h + sqrt(1 - a^2) sigmoid(i) u.

    gates: r of a head's channels, then i of them, head by head.
    """

    u: Tensor  # [B, 1, D]
    z: Tensor  # [B, 1, D]
    gates: Tensor  # [B, 1, H, 2 D / H]
    h: Tensor  # [B, D], D side by side; updated
    rate: Tensor  # [D]
    decay_scale: float


LayerStep = ConvStep | RetentionStep | MLSTMStep | RGLRUStep
