"""The mixer of Mamba-1."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.ops import causal_conv1d, mamba1

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .decay_init import initial_dt_bias
from .projection import Projection
from .step import Mixer

State = tuple[Tensor, Tensor]


class Mamba(Mixer):
    """Mamba-1's block: one projection in, a short convolution, the selective scan with its gate, one projection out.

        u, z = W x;  u = conv(u);  dt, B, C = W_x u
        y = W_o mamba1(u, softplus(W_dt dt + b_dt), -exp(A_log), B, C, D, z)

    Source: Gu, Dao 2023, Mamba (arXiv:2312.00752), section 3.4 and figure 3. Parameters have the names and shapes of
    its code, mamba_ssm's `Mamba`, so that checkpoints of either load in the other, and its starting values: A = 1 to
    d_state, D = 1, softplus(b_dt) log-uniform from 0.001 to 0.1.

    Args:
        d_model: width of inputs and outputs.
        d_state: numbers of state of each inner channel.
        expand: inner width, in d_model.
        conv_width: taps of the short convolution.
        dt_rank: of W_dt; d_model / 16, rounded up, by default.
        backend: forces a backend of `holdfast.mamba1`.

    State: (S [N, expand * d_model, d_state], tail [N, conv_width - 1, expand * d_model]), float32 (float64 for float64
    inputs): the scan's state and the convolution's last inputs.

    Raises:
        ValueError: for sizes that are not positive, named in the message.
    """

    # with another, as tests have, a step is a forward pass
    op = staticmethod(mamba1)

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        expand: float = 2.0,
        conv_width: int = 4,
        dt_rank: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.inner = head_width("expand", expand, "d_model", d_model, heads=1)
        self.d_state = check_positive("d_state", d_state)
        self.conv_width = check_positive("conv_width", conv_width)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else check_positive("dt_rank", dt_rank)
        self.backend = backend
        self.in_proj = Projection(d_model, 2 * self.inner)
        # holds the taps; `causal_conv1d` runs them
        self.conv1d = nn.Conv1d(self.inner, self.inner, conv_width, groups=self.inner, padding=conv_width - 1)
        self.x_proj = Projection(self.inner, self.dt_rank + 2 * d_state)
        self.dt_proj = nn.Linear(self.dt_rank, self.inner)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(self.inner, 1))
        self.D = nn.Parameter(torch.ones(self.inner))
        self.out_proj = Projection(self.inner, d_model)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(self.dt_rank**-0.5), self.dt_rank**-0.5)
            self.dt_proj.bias.copy_(initial_dt_bias(self.inner))

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
        S, tail = check_state(state, self.state_of(check_input(x, self.d_model, cu_seqlens), x.dtype))
        u, z = self.in_proj(x).chunk(2, -1)
        taps, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        u, tail = causal_conv1d(u, taps, bias, "silu", tail, output_final_state, cu_seqlens)
        dt, B, C = self.parameters_of(u)
        A, dt_bias = self.rate(u.dtype), self.dt_proj.bias
        y, S = self.op(u, dt, A, B, C, self.D, z, dt_bias, True, S, output_final_state, cu_seqlens, self.backend)
        return self.out_proj(y), (S, tail) if output_final_state else None

    def state_of(self, sequences: int, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of a state's tensors, for inputs of a dtype."""
        shapes = {"S": (self.inner, self.d_state), "tail": (self.conv_width - 1, self.inner)}
        return [(name, (sequences, *shape), wide(dtype)) for name, shape in shapes.items()]

    def parameters_of(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt [B, T, inner] before its bias, B and C [B, T, d_state] of the convolution's outputs [B, T, inner]."""
        dt, B, C = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], -1)
        return F.linear(dt, self.dt_proj.weight), B, C

    def rate(self, dtype: torch.dtype) -> Tensor:
        """A [inner, d_state], float32 or wider, for inputs of a dtype."""
        return -self.A_log.to(wide(dtype)).exp()

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.mamba(self, x, state)
