"""The mixer of the scalar LSTM of xLSTM."""

import torch
from torch import Tensor, nn

from holdfast.ops import slstm

from .check import check_divides, check_input, check_positive, check_state, wide
from .norm import HeadLayerNorm
from .projection import Projection
from .step import Mixer

State = tuple[Tensor, Tensor, Tensor, Tensor]


class SLSTM(Mixer):
    """xLSTM's scalar memory: exponential gates, and recurrent weights that mix the channels of a head.

        i, f, z, o = W x_t + R h_{t-1} + b;  h = slstm(...);  y = W_o layernorm(h)

    Source: Beck et al. 2024, xLSTM (arXiv:2405.04517), sections 2.2 and A.2: a norm over each head's output; b_f from 3
    to 6 over the channels of a head, so that memory starts long. R starts uniform within D ** -0.5.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides d_model into heads of D channels.
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.slstm`.

    State: (h, c, n, m), each [N, H, D], float32 (float64 for float64 inputs).

    Raises:
        ValueError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(self, d_model: int, num_heads: int = 4, norm_eps: float = 1e-6, backend: str | None = None) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.head_dim = check_divides("num_heads", num_heads, "d_model", d_model)
        self.num_heads = num_heads
        self.backend = backend
        self.in_proj = Projection(d_model, 4 * d_model)
        bound = self.head_dim**-0.5
        self.R = nn.Parameter(torch.empty(4, num_heads, self.head_dim, self.head_dim).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(4, num_heads, self.head_dim))
        with torch.no_grad():
            self.b[1] = torch.linspace(3, 6, self.head_dim)
        self.norm = HeadLayerNorm(num_heads, self.head_dim, norm_eps)
        self.out_proj = Projection(d_model, d_model)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        shape = (sequences, self.num_heads, self.head_dim)
        given = check_state(state, [(name, shape, wide(x.dtype)) for name in "hcnm"])
        gates = self.in_proj(x).unflatten(-1, (4, self.num_heads, self.head_dim))
        h, final = slstm(
            gates,
            self.R,
            self.b,
            None if state is None else torch.stack(given),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return self.out_proj(self.norm(h).flatten(-2)), final.unbind(0)
