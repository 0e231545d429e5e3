"""Softmax attention in the place of a mixer: what every figure of the suite is held against."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal softmax attention by torch's scaled_dot_product_attention, without positions.

    State: keys and values of all tokens, each [B, H, T, D].
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x [B, T, width] -> (y, state). With a state from `with_room`, x is one token, which takes the free place."""
        parts = self.qkv_proj(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if state is None:
            state = k, v
        else:
            for kept, new in zip(state, (k, v), strict=True):
                kept[:, :, -1:] = new
        y = F.scaled_dot_product_attention(q, *state, is_causal=x.shape[1] > 1)
        return self.out_proj(y.transpose(1, 2).flatten(2)), state


def with_room(state: State) -> State:
    """A copy with one more place at the end, which is written in place: a cache has it from the beginning."""
    keys, values = (torch.cat([x, x[:, :, -1:]], 2) for x in state)
    return keys, values
