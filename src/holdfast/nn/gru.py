"""GRU with the arguments and weights of torch.nn.GRU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from holdfast.ops import gru

from .stack import Stack


class GRU(Stack):
    """Stands in for torch.nn.GRU: the same arguments, results and, at num_heads = 1, state_dict.

        r, z = sigmoid(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh);  n = tanh(W_in x_t + b_in + r (W_hn h_{t-1} + b_hn))
        h_t = (1 - z) n + z h_{t-1}

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as torch.nn.GRU.
        num_heads: W_hh is block-diagonal in as many blocks; weight_hh is [3 * hidden_size, hidden_size / num_heads],
            its rows ordered by gate, head and output, and the hidden channels by head.
        backend: forces a backend of `holdfast.gru`.

    Raises:
        ValueError, TypeError: for arguments, inputs or states of the wrong type or shape, named in the message.
    """

    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            num_heads,
            backend,
        )

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        # the op's gates are r, z, n and m: the candidate's input part and its recurrent part, which r multiplies
        hidden, heads = self.hidden_size, (self.num_heads, self.head_dim)
        both = (bias_ih + bias_hh)[: 2 * hidden]
        return torch.cat([both, bias_ih[2 * hidden :], bias_hh[2 * hidden :]]).unflatten(0, (4, *heads))

    def _step(
        self, x: Tensor, R: Tensor, b: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return gru(x, R, b, state, True, cu_seqlens, backend=self.backend)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """input [T, B, input_size] ([B, T, input_size] with batch_first, [T, input_size] for one) or PackedSequence.

        hx: h_0 [layers * directions, B, hidden_size] ([layers * directions, hidden_size] for one).
        Returns the output, directions * hidden_size wide, and h_n, in the output's dtype.
        """
        output, (h,) = self._forward(input, hx, ("hx",))
        return output, h
