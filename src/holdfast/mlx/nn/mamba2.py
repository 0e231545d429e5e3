"""The mixer of Mamba-2."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..check import check_count, check_divides, check_state
from ..ssd import ssd_scan_with_state
from .layer import Layer, check_states, head_width

State = tuple[mx.array, mx.array]
HEAD_DIM = 64
SMALLEST_STEP, LARGEST_STEP = 0.001, 0.1
SLOWEST_RATE, FASTEST_RATE = 1.0, 16.0


class Mamba2(Layer):
    """Mamba-2's block: one projection in, a short convolution, the state space scan, a gated norm, one projection out.

        z, (x, B, C), dt = W u;  x, B, C = silu(conv(x, B, C))
        y = W_o rmsnorm((ssd_scan(x, softplus(dt + dt_bias), B, C, -exp(A_log)) + D x) silu(z))

    Source: Dao, Gu 2024, Transformers are SSMs (arXiv:2405.21060), section 7 and figure 6; starting values of
    dt_bias and A_log as in its code: softplus(dt_bias) log-uniform from 0.001 to 0.1, A uniform from 1 to 16, D = 1.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand * d_model; by default heads are 64 channels wide.
        d_state: channels of B and C.
        n_groups: number of B's and C's, each for num_heads / n_groups heads; also the groups of the norm.
        expand: inner width, in d_model.
        conv_width: taps of the short convolution.
        norm_eps: of the gated norm.
        backend: forces a backend of `ssd_scan`.

    State: (S [B, H, P, d_state], tail [B, conv_width - 1, expand * d_model + 2 * n_groups * d_state]), float32: the
    matrix state and the convolution's last inputs.

    Raises:
        TypeError, ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int | None = None,
        d_state: int = 128,
        n_groups: int = 1,
        expand: float = 2.0,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        inner = head_width("expand", expand, d_model, 1)
        if num_heads is None:
            if inner % HEAD_DIM:
                raise ValueError(
                    f"num_heads: expected to be given where expand * d_model is no multiple of {HEAD_DIM}; got None "
                    f"with expand * d_model = {inner}"
                )
            num_heads = inner // HEAD_DIM
        self.head_dim = head_width("expand", expand, d_model, num_heads)
        check_divides("n_groups", check_count("n_groups", n_groups), "num_heads", num_heads)
        self.d_model, self.num_heads, self.n_groups, self.backend = d_model, num_heads, n_groups, backend
        self.d_state, self.conv_width = check_count("d_state", d_state), check_count("conv_width", conv_width)
        self.norm_eps = norm_eps
        mixed = inner + 2 * n_groups * d_state
        self.splits = [inner, inner + mixed]
        self.conv_splits = [inner, inner + n_groups * d_state]
        self.in_proj = nn.Linear(d_model, inner + mixed + num_heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, conv_width, groups=mixed)
        self.A_log = mx.log(mx.random.uniform(SLOWEST_RATE, FASTEST_RATE, (num_heads,)))
        self.D = mx.ones(num_heads)
        step = mx.exp(mx.random.uniform(math.log(SMALLEST_STEP), math.log(LARGEST_STEP), (num_heads,)))
        self.dt_bias = mx.log(mx.expm1(step))
        self.norm_weight = mx.ones(inner)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def __call__(self, x: mx.array, state: State | None = None) -> tuple[mx.array, State]:
        """x [B, L, d_model] -> (y [B, L, d_model], the state to continue from)."""
        self.check_input(x)
        S, tail = check_states(state, 2)
        batch, L, _ = x.shape
        z, mixed, dt = mx.split(self.in_proj(x), self.splits, axis=-1)
        tail = check_state(tail, (batch, self.conv_width - 1, mixed.shape[-1]), "state[1]")
        mixed = mx.concatenate([tail.astype(mixed.dtype), mixed], axis=1)
        tail = mixed[:, L:].astype(mx.float32)
        u, B, C = mx.split(nn.silu(self.conv(mixed)), self.conv_splits, axis=-1)
        u = u.reshape(batch, L, self.num_heads, self.head_dim)
        B, C = (part.reshape(batch, L, self.n_groups, self.d_state) for part in (B, C))
        A = mx.repeat(-mx.exp(self.A_log.astype(mx.float32))[:, None], self.d_state, axis=1)
        delta = nn.softplus(dt.astype(mx.float32) + self.dt_bias)
        y, S = ssd_scan_with_state(u, delta, B, C, A, initial_state=S, backend=self.backend)
        y = y + self.D.astype(u.dtype)[:, None] * u
        return self.out_proj(self._gated_norm(y.flatten(-2), z)), (S, tail)

    def _gated_norm(self, y: mx.array, z: mx.array) -> mx.array:
        """rmsnorm(y silu(z)) over each group of channels."""
        grouped = (y * nn.silu(z)).reshape(*y.shape[:-1], self.n_groups, -1)
        return mx.fast.rms_norm(grouped, None, self.norm_eps).flatten(-2) * self.norm_weight
