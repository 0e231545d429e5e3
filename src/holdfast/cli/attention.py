"""Softmax attention in the form of a mixer: what the recurrences are held against."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.nn.step import Mixer
from holdfast.ops.rotary import rotary

State = tuple[Tensor, Tensor, Tensor]


class Attention(Mixer):
    """Causal softmax attention by torch's scaled_dot_product_attention.

    rotary_base: of the rotation of queries and keys by their positions; None for no positions.
    State: keys and values [B, H, P, D] and how many of their P places are taken, int64 [B]. `forward` returns one
    without a place to spare; `step`, which works in place, takes the next free place of one from `with_room`.
    """

    def __init__(self, width: int, num_heads: int, rotary_base: float | None = 10000.0) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"expected channels that the heads share; got {width} for {num_heads}")
        if rotary_base is not None and width // num_heads % 2:
            raise ValueError(f"expected an even number of channels a head, for the rotation; got {width // num_heads}")
        self.num_heads = num_heads
        self.rotary_base = rotary_base
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x [B, T, width] -> (y, the state to continue from)."""
        if state is not None:
            state = with_room(state, x.shape[1])
            return self._continued(x, state), state
        q, k, v = self.projected(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        taken = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        return self.joined(y), (k, v, taken)

    def projected(self, x: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, H, T, D], the first two turned to positions [B, T]; by default those from 0 on."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        if self.rotary_base is not None:
            q, k = rotary(q, k, position, self.rotary_base)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def joined(self, y: Tensor) -> Tensor:
        """Of heads [B, H, T, D]."""
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _continued(self, x: Tensor, state: State) -> Tensor:
        """The tokens of x take the next places of the state, in place."""
        keys, values, taken = state
        position = taken[:, None] + torch.arange(x.shape[1], device=x.device)
        q, k, v = self.projected(x, position)
        place = position[:, None, :, None].expand_as(k)
        keys.scatter_(2, place, k)
        values.scatter_(2, place, v)
        seen = torch.arange(keys.shape[2], device=x.device) <= position[..., None]
        taken += x.shape[1]
        return self.joined(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None]))

    def _token(self, x: Tensor, state: State) -> Tensor:
        keys, _, taken = state
        # on a GPU a step reads nothing on the host
        if taken.device.type == "cpu" and (taken >= keys.shape[2]).any():
            raise ValueError(f"state: expected a free place, as with_room makes; all {keys.shape[2]} are taken")
        return self._continued(x, state)


def with_room(state: State, tokens: int) -> State:
    """A copy with so many more places."""
    keys, values, taken = state
    return F.pad(keys, (0, 0, 0, tokens)), F.pad(values, (0, 0, 0, tokens)), taken.clone()
