"""The short convolution of a mixer over ranks: its state is the last W - 1 inputs, which the next rank needs first."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.nn.short_convolution import ShortConvolution
from holdfast.recurrences.summary import Summary

from .exchange import through_ranks
from .group import Ranks


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """A short convolution over one span of tokens x [B, T, channels], without the inputs before it.

    A state is the last W - 1 inputs, added [N, W - 1, channels], oldest first. A span adds its own last ones, at the
    end, and shifts the others out: its carry [N] counts them.
    """

    convolution: ShortConvolution
    x: Tensor
    name: str = "short_convolution"

    @property
    def lead(self) -> Tensor:
        return self.x

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        tensors = (self.x, *self.convolution.parameters())
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def before(self) -> int:
        return self.convolution.width - 1

    def cut(self, start: int, end: int) -> "ConvolutionCall":
        return replace(self, x=self.x[:, start:end])

    def fold(self, spans: int) -> "ConvolutionCall":
        return replace(self, x=self.x.unflatten(1, (spans, self.x.shape[1] // spans)).flatten(0, 1))

    def start(self, rows: int) -> Summary:
        return Summary(self.x.new_zeros(rows, self.before, self.x.shape[2], dtype=self.dtype))

    def summary(self) -> Summary:
        length = min(self.x.shape[1], self.before)
        last = self.x[:, self.x.shape[1] - length :].to(self.dtype)
        rows = F.pad(last, (0, 0, self.before - length, 0))
        return Summary(rows, rows.new_full((rows.shape[0],), float(length)))

    def merge(self, earlier: Summary, later: Summary) -> Summary:
        steps = torch.arange(self.before, device=self.x.device)
        count = later.carry[:, None].long()
        moved = (steps + count).clamp_max(self.before - 1)[..., None].expand_as(earlier.added)
        stays = (steps < self.before - count)[..., None]
        rows = torch.where(stays, earlier.added.gather(1, moved), later.added)
        carry = None if earlier.carry is None else (earlier.carry + later.carry).clamp_max(self.before)
        return Summary(rows, carry)

    def outputs(self, state: Summary | None, cu_seqlens: Tensor | None, final: bool) -> tuple[Tensor, Summary | None]:
        tail = None if state is None else state.added
        y, last = ShortConvolution.forward(self.convolution, self.x, tail, cu_seqlens)
        return y, Summary(last) if final else None


def convolve(
    convolution: ShortConvolution, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """`ShortConvolution.forward` of this rank's tokens x [B, T, channels]; the ranks exchange W - 1 inputs.

    tail: [N, W - 1, channels], before each sequence's first token, and cu_seqlens [N + 1], of all ranks' tokens, as
    in `through_ranks`, which also says what is returned as the last inputs of each sequence. Raises as it does.
    """
    call = ConvolutionCall(convolution, x)
    if not call.before:
        return ShortConvolution.forward(convolution, x, tail, None)
    y, last = through_ranks(call, None if tail is None else Summary(tail), True, cu_seqlens, ranks)
    return y, last.added
