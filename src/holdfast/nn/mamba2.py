"""The mixer of Mamba-2."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.ops import ssd
from holdfast.ops.check import name_of
from holdfast.ops.mamba2_layer import mamba2_layer

from . import step
from .check import check_divides, check_input, check_positive, check_state, head_width, wide
from .decay_init import initial_A_log, initial_dt_bias
from .in_projection import InProjection, join_projections
from .norm import GatedRMSNorm
from .projection import Projection
from .short_convolution import ShortConvolution
from .step import Mixer

State = tuple[Tensor, Tensor]
HEAD_DIM = 64


class Mamba2(Mixer):
    """Mamba-2's block: one projection in, a short convolution, the state space scan, a gated norm, one projection out.

        z, (x, B, C), dt = W u;  x, B, C = conv(x, B, C)
        y = W_o rmsnorm(ssd(x, softplus(dt + dt_bias), -exp(A_log), B, C, D) silu(z))

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
        backend: forces a backend of `holdfast.ssd`.

    State: (S [N, H, d_state, P], tail [N, conv_width - 1, expand * d_model + 2 * n_groups * d_state]), float32 (float64
    for float64 inputs): the matrix state and the convolution's last inputs.

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place; with another, what stands around it runs apart
    op = staticmethod(ssd)

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
        self.d_model = check_positive("d_model", d_model)
        inner = head_width("expand", expand, "d_model", d_model, heads=1)
        if num_heads is None:
            if inner % HEAD_DIM:
                raise ValueError(
                    f"num_heads: expected to be given where expand * d_model is no multiple of {HEAD_DIM}; got None "
                    f"with expand * d_model = {inner}"
                )
            num_heads = inner // HEAD_DIM
        self.head_dim = check_divides("num_heads", num_heads, "expand * d_model", inner)
        check_divides("n_groups", n_groups, "num_heads", num_heads)
        self.num_heads, self.n_groups = num_heads, n_groups
        self.d_state = check_positive("d_state", d_state)
        self.backend = backend
        written = n_groups * d_state
        self.widths = [inner, inner + 2 * written, num_heads]
        self.conv_widths = [inner, written, written]
        self.in_proj = InProjection(d_model, self.widths)
        self.conv = ShortConvolution(sum(self.conv_widths), check_positive("conv_width", conv_width), bias=True)
        self.A_log = nn.Parameter(initial_A_log(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.dt_bias = nn.Parameter(initial_dt_bias(num_heads))
        self.norm = GatedRMSNorm(n_groups, inner // n_groups, eps=norm_eps)
        self.out_proj = Projection(inner, d_model)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}in_proj.weight")
        # without the rows that nothing reads
        if weight is not None and weight.shape[:1] == (self.in_proj.used,):
            join_projections(self, state_dict, prefix, ("in_proj",))
        super()._load_from_state_dict(state_dict, prefix, *rest)

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
        sequences = check_input(x, self.d_model, cu_seqlens)
        dtype = wide(x.dtype)
        shape = (sequences, self.num_heads, self.d_state, self.head_dim)
        tail_shape = (sequences, self.conv.width - 1, self.conv.channels)
        S, tail = check_state(state, [("S", shape, dtype), ("tail", tail_shape, dtype)])
        mix = self._mix if self.op is Mamba2.op else self._mix_in_parts
        y, S, tail = mix(self.in_proj(x), S, tail, cu_seqlens, output_final_state)
        return self.out_proj(y), (S, tail) if output_final_state else None

    def _mix(
        self, projected: Tensor, S: Tensor | None, tail: Tensor | None, cu_seqlens: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """y [B, T, expand * d_model] before the last projection, and the state."""
        parameters = (self.conv.weight, self.conv.bias, self.A_log, self.D, self.dt_bias, self.norm.weight)
        eps, backend = self.norm.eps, name_of(self.backend)
        return mamba2_layer(projected, *parameters, S, tail, eps, cu_seqlens, final, backend)

    def _mix_in_parts(
        self, projected: Tensor, S: Tensor | None, tail: Tensor | None, cu_seqlens: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_mix` around an op that is not the layer's own."""
        z, mixed, dt, _ = projected.split([*self.widths, projected.shape[2] - sum(self.widths)], -1)
        mixed, tail = self.conv(mixed, tail, cu_seqlens)
        u, B, C = mixed.split(self.conv_widths, -1)
        u, z = (part.unflatten(-1, (self.num_heads, -1)) for part in (u, z))
        B, C = (part.unflatten(-1, (self.n_groups, -1)) for part in (B, C))
        A = -self.A_log.to(wide(projected.dtype)).exp()
        y, S = self.op(u, dt, A, B, C, self.D, z, self.dt_bias, True, S, final, cu_seqlens, self.backend)
        y = self.norm(y.flatten(-2).unflatten(-1, (self.n_groups, -1)))
        return y.flatten(-2), S, tail

    def _token(self, x: Tensor, state: State) -> Tensor:
        return step.mamba2(self, x, state)
