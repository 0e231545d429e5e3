"""LSTM with the arguments and weights of torch.nn.LSTM."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from holdfast.kernels.runtime.torch_private import is_transformed, may_have_tangents
from holdfast.ops import lstm

from .sequences import Sequences
from .stack import Stack


class LSTM(Stack):
    """Stands in for torch.nn.LSTM: the same arguments, results and, at num_heads = 1, state_dict.

        i, f, g, o = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g);  h_t = sigmoid(o) tanh(c_t)

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as torch.nn.LSTM.
        proj_size: only 0; projections of the output are not available.
        num_heads: W_hh is block-diagonal in as many blocks; weight_hh is [4 * hidden_size, hidden_size / num_heads],
            its rows ordered by gate, head and output, and the hidden channels by head.
        backend: forces a backend of `holdfast.lstm`. Without one, oneDNN runs float32 on a CPU, as in torch.nn.LSTM.

    Raises:
        ValueError, TypeError: for arguments, inputs or states of the wrong type or shape, named in the message.
    """

    gates = 4
    states = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        backend: str | None = None,
    ) -> None:
        if proj_size != 0:
            raise ValueError(f"proj_size: expected 0, as projections are not available; got {proj_size}")
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

    def _step(
        self, x: Tensor, R: Tensor, b: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return lstm(x, R, b, state, True, cu_seqlens, backend=self.backend)

    def _run(self, sequences: Sequences, states: Tensor | None) -> tuple[Tensor, Tensor]:
        x = sequences.x
        # first what costs a GPU's calls nothing
        if not x.is_cpu or torch.compiler.is_compiling():
            return super()._run(sequences, states)
        weights = self._weights()
        if not self._onednn_serves(sequences, states, weights):
            return super()._run(sequences, states)
        if states is None:
            states = x.new_zeros(2, self.num_layers * (1 + self.bidirectional), len(x), self.hidden_size)
        options = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional, True)
        output, h, c = torch.lstm(x, tuple(states), weights, *options)
        return output, torch.stack([h, c])

    def _onednn_serves(self, sequences: Sequences, states: Tensor | None, weights: list[Tensor]) -> bool:
        """Whether torch.lstm would run the same by oneDNN, whose time loop is faster than PyTorch's operations."""
        given = [sequences.x, *weights, *([] if states is None else [states])]
        return (
            self.backend is None
            and self.num_heads == 1
            and sequences.cu_seqlens is None
            and all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.dtype == torch.float32 for x in given)
            and sequences.x.numel() > 0
            and torch.backends.mkldnn.is_available()
            and not torch.is_autocast_enabled("cpu")
            # which the op refuses by name
            and not is_transformed()
            and not may_have_tangents()
        )

    def _weights(self) -> list[Tensor]:
        """In torch.lstm's order."""
        names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ())]
        suffixes = [suffix for layer in range(self.num_layers) for suffix in self._suffixes(layer)]
        return [getattr(self, name + suffix) for suffix in suffixes for name in names]

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """input [T, B, input_size] ([B, T, input_size] with batch_first, [T, input_size] for one) or PackedSequence.

        hx: (h_0, c_0), each [layers * directions, B, hidden_size] ([layers * directions, hidden_size] for one).
        Returns the output, directions * hidden_size wide, and (h_n, c_n), in the output's dtype.
        """
        output, (h, c) = self._forward(input, hx, ("h_0", "c_0"))
        return output, (h, c)
