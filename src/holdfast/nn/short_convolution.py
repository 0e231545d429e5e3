"""The short causal convolution in front of a recurrence, with the tail that a next call continues from."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.conv.call import Activation
from holdfast.ops import causal_conv1d

from .check import check_positive


class ShortConvolution(nn.Module):
    """y_t = silu(sum_j weight[:, j] * x_{t - width + 1 + j} + bias), each channel by itself: `holdfast.causal_conv1d`.

    weight: [channels, width], the last column for the present token; [channels, 1, width], as nn.Conv1d has it, is read
    from a checkpoint too. bias: [channels], or None.
    Raises ValueError for channels or a width below 1.
    """

    activation: Activation | None = "silu"

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.channels = check_positive("channels", channels)
        self.width = check_positive("width", width)
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.shape == (self.channels, 1, self.width):
            state_dict[f"{prefix}weight"] = weight[:, 0]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}"

    def forward(self, x: Tensor, tail: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(y, the tail to continue from).

        x and y: [B, T, channels], packed with B = 1 where cu_seqlens [N + 1] is given. tail: the width - 1 inputs
        before the first, [N, width - 1, channels], oldest first, float32 (float64 for float64); zeros by default.
        """
        return causal_conv1d(x, self.weight, self.bias, self.activation, tail, True, cu_seqlens)


class TokenShift(ShortConvolution):
    """x_{t - 1} - x_t, each channel by itself: a short convolution with taps that do not learn, and no activation."""

    activation = None

    def __init__(self, channels: int) -> None:
        nn.Module.__init__(self)
        self.channels, self.width, self.bias = check_positive("channels", channels), 2, None
        self.register_buffer("weight", torch.tensor([1.0, -1.0]).repeat(channels, 1), persistent=False)
