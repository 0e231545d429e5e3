"""Softmax attention in the place of a mixer: what every figure of the suite is held against."""

import torch.nn.functional as F
from torch import Tensor

from ... import attention


class Attention(attention.Attention):
    """That of `holdfast train lm` without positions. A step is the one that fills the state's last place."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads, rotary_base=None)

    def _token(self, x: Tensor, state: attention.State) -> Tensor:
        # no mask, with which the fastest kernels do not run; and it can be timed again and again
        keys, values, _ = state
        q, keys[:, :, -1:], values[:, :, -1:] = self.projected(x)
        return self.joined(F.scaled_dot_product_attention(q, keys, values))
