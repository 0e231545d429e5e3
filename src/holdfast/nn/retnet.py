"""The mixer of RetNet: multi-scale retention."""

import torch
from torch import Tensor

from holdfast.ops import simple_gla
from holdfast.ops.retention_layer import retention_layer
from holdfast.ops.rotary import rotary
from holdfast.recurrences.packing import packed_beside
from holdfast.recurrences.retnet import log_decay

from . import step
from .check import check_input, check_positive, check_state, head_width, wide
from .norm import GatedRMSNorm
from .projection import Projection
from .step import Mixer

State = tuple[Tensor, Tensor]


def _positions(
    x: Tensor, sequences: int, seen: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Positions of the tokens of x [B, T, ...], [B, T] or [1, T], and the number seen after them, [N].

    None for positions that are the tokens' places in T.
    """
    if seen is None and cu_seqlens is None:
        return None, torch.full((sequences,), x.shape[1], dtype=torch.int64, device=x.device)
    steps = torch.arange(x.shape[1], device=x.device)[None]
    start = seen if seen is not None else torch.zeros(sequences, dtype=torch.int64, device=x.device)
    if cu_seqlens is None:
        return steps + start[:, None], start + x.shape[1]
    cu_seqlens, sequence = packed_beside(x, cu_seqlens)
    return steps - cu_seqlens[sequence] + start[sequence], start + cu_seqlens.diff()


class RetNet(Mixer):
    """Multi-scale retention: rotated queries and keys, a constant decay a head, values at twice the width.

        q, k, v = W x;  o = retnet(rotate(q), rotate(k), v);  y = W_o (rmsnorm(o) silu(W_g x))

    Source: Sun et al. 2023, Retentive Network (arXiv:2307.08621), section 2.2, with RMS in place of group norm, and the
    rotation without xPos's scaling, which the decay of retention replaces.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides expand_k * d_model, into an even number of channels, and expand_v * d_model.
        expand_k, expand_v: width of keys and of values, in d_model.
        rotary_base: base of the rotation's frequencies.
        norm_eps: of the norm over each head's output.
        backend: forces a backend of `holdfast.retnet`.

    State: (S [N, H, K, V], position [N]), float32 (float64 for float64 inputs) and int64: the number of tokens seen.

    Raises:
        ValueError: for sizes that are not positive, do not divide or leave keys of odd width, named in the message.
    """

    # holdfast.parallel puts the same over several ranks in their place; retention is simple GLA by a constant decay
    op = staticmethod(simple_gla)
    positions = staticmethod(_positions)
    # the number of the first head, by which heads decay: another where this is a part of a layer's heads
    first_head = 0

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        rotary_base: float = 10000.0,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        self.key_dim = head_width("expand_k", expand_k, "d_model", d_model, num_heads)
        self.value_dim = head_width("expand_v", expand_v, "d_model", d_model, num_heads)
        if self.key_dim % 2:
            raise ValueError(
                f"expand_k: expected an even number of key channels a head, for the rotation; got {self.key_dim} "
                f"from expand_k = {expand_k}, d_model = {d_model}, num_heads = {num_heads}"
            )
        if not rotary_base > 0:
            raise ValueError(f"rotary_base: expected a positive number; got {rotary_base}")
        self.rotary_base = rotary_base
        self.backend = backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        self.widths = [keys, keys, values, values]
        self.in_proj = Projection(d_model, sum(self.widths))
        self.norm = GatedRMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = Projection(values, d_model)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. Raises ValueError or
        TypeError for x, a state or cu_seqlens of the wrong shape or dtype.
        """
        sequences = check_input(x, self.d_model, cu_seqlens)
        shape = (sequences, self.num_heads, self.key_dim, self.value_dim)
        expected = [("S", shape, wide(x.dtype)), ("position", (sequences,), torch.int64)]
        S, seen = check_state(state, expected)
        packed = self.in_proj(x)
        position, after = self.positions(x, sequences, seen, cu_seqlens)
        if self.op is not RetNet.op:
            return self._in_parts(packed, S, position, cu_seqlens, after)
        y, S = retention_layer(
            packed,
            self.norm.weight,
            S,
            position,
            self.num_heads,
            self.rotary_base,
            self.norm.eps,
            cu_seqlens,
            self.backend,
            self.first_head,
        )
        return self.out_proj(y), (S, after)

    def _in_parts(
        self, packed: Tensor, S: Tensor | None, position: Tensor | None, cu_seqlens: Tensor | None, after: Tensor
    ) -> tuple[Tensor, State]:
        """`retention_layer` around an op that is not the layer's own."""
        q, k, v, gate = (part.unflatten(-1, (self.num_heads, -1)) for part in packed.split(self.widths, -1))
        q, k = rotary(q, k, position, self.rotary_base)
        g = log_decay(v, self.first_head)
        o, S = self.op(q, k, v, g, None, S, True, cu_seqlens, self.backend)
        return self.out_proj(self.norm(o, gate).flatten(-2)), (S, after)

    def _token(self, x: Tensor, state: State) -> Tensor:
        # the step's kernel counts heads from 0
        return Mixer._token(self, x, state) if self.first_head else step.retnet(self, x, state)
