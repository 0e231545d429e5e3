"""Elman network with the arguments and weights of torch.nn.RNN."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from holdfast.ops import elman
from holdfast.recurrences.elman import CELLS, Nonlinearity

from .stack import Stack


class RNN(Stack):
    """Stands in for torch.nn.RNN: the same arguments, results and, at num_heads = 1, state_dict.

        h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh), or relu for tanh

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            torch.nn.RNN.
        num_heads: W_hh is block-diagonal in as many blocks; weight_hh is [hidden_size, hidden_size / num_heads], its
            rows ordered by head and output, and the hidden channels by head.
        backend: forces a backend of `holdfast.elman`.

    Raises:
        ValueError, TypeError: for arguments, inputs or states of the wrong type or shape, named in the message.
    """

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Nonlinearity = "tanh",
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
        if nonlinearity not in CELLS:
            raise ValueError(f"nonlinearity: expected one of {', '.join(map(repr, CELLS))}; got {nonlinearity!r}")
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
        self.nonlinearity = nonlinearity

    def _step(
        self, x: Tensor, R: Tensor, b: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return elman(x, R, b, state, True, cu_seqlens, backend=self.backend, nonlinearity=self.nonlinearity)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """input [T, B, input_size] ([B, T, input_size] with batch_first, [T, input_size] for one) or PackedSequence.

        hx: h_0 [layers * directions, B, hidden_size] ([layers * directions, hidden_size] for one).
        Returns the output, directions * hidden_size wide, and h_n, in the output's dtype.
        """
        output, (h,) = self._forward(input, hx, ("hx",))
        return output, h
