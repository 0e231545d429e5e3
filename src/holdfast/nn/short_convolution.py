"""The short causal convolution in front of a recurrence, with the tail that a next call continues from."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.recurrences.packing import packed_beside

from .check import check_positive, wide


class ShortConvolution(nn.Module):
    """y_t = silu(sum_j weight[:, j] * x_{t - width + 1 + j} + bias), each channel by itself.

    weight: [channels, width], the last column for the present token. bias: [channels], or None.
    Raises ValueError for channels or a width below 1.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.channels = check_positive("channels", channels)
        self.width = check_positive("width", width)
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}"

    def forward(self, x: Tensor, tail: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(y, the tail to continue from).

        x and y: [B, T, channels], packed with B = 1 where cu_seqlens [N + 1] is given. tail: the width - 1 inputs
        before the first, [N, width - 1, channels], oldest first, float32 (float64 for float64); zeros by default.
        """
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        before = self.width - 1
        if tail is None:
            tail = x.new_zeros(sequences, before, self.channels)
        tail = tail.to(x.dtype)
        if cu_seqlens is None:
            rows = torch.cat([tail, x], 1)
            y, last = self._convolve(rows), rows[:, x.shape[1] :]
        else:
            y, last = self._packed(x, tail, cu_seqlens)
        # a copy, because a view would keep all of the rows alive
        return y, last.to(wide(x.dtype), copy=True)

    def _packed(self, x: Tensor, tail: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        # every sequence is laid behind its own tail in one long row
        length, (sequences, before, channels) = x.shape[1], tail.shape
        size = length + sequences * before
        steps = torch.arange(length, device=x.device)
        numbers = torch.arange(sequences, device=x.device)
        cu_seqlens, sequence = packed_beside(x, cu_seqlens)
        out = steps + sequence * before
        offsets = torch.arange(before, device=x.device)

        def beside(bounds: Tensor) -> Tensor:
            # offsets beyond T are refused by the op, which reads their values
            return ((bounds + numbers * before)[:, None] + offsets).clamp(0, size - 1).flatten()

        row = x.new_zeros(size, channels).index_copy(0, beside(cu_seqlens[:-1]), tail.flatten(0, 1))
        row = row.index_copy(0, out + before, x[0])
        last = row[beside(cu_seqlens[1:])].unflatten(0, (sequences, before))
        return self._convolve(row[None])[:, out], last

    def _convolve(self, rows: Tensor) -> Tensor:
        """[B, T + width - 1, channels] -> [B, T, channels]."""
        length = rows.shape[1] - self.width + 1
        # a step of decoding is a dot product, for which a convolution costs several times as much; a compiler fuses the
        # taps, while with a convolution Inductor wants other layouts and fails where T is symbolic (pytorch#185510)
        if torch.compiler.is_compiling() or length <= 1:
            dtype = wide(rows.dtype)
            taps = self.weight.to(dtype).mT[:, None]
            y = sum(rows[:, j : j + length] * taps[j] for j in range(self.width))
            y = y if self.bias is None else y + self.bias
            return F.silu(y).to(rows.dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        y = F.conv1d(rows.mT, self.weight.to(rows.dtype)[:, None], bias, groups=self.channels).mT
        return F.silu(y).to(rows.dtype)
