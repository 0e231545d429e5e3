"""What is no recurrence of its own, in float64: the inner half of a chunkwise kernel, norm and short convolution."""

from typing import Any

import torch
from torch import Tensor

from .exact_matrix import per_value_head
from .rows import Rows


def _activated(gate: Tensor, activation: str) -> Tensor:
    opened = torch.sigmoid(gate)
    return gate * opened if activation == "silu" else opened


def gated_rms_norm(
    rows: Rows, o: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, eps=1e-5, activation="silu",
    center=False,
) -> tuple[Tensor]:  # fmt: skip
    o = o - o.sum(-1, keepdim=True) / o.shape[-1] if center else o
    y = o / torch.sqrt((o * o).sum(-1, keepdim=True) / o.shape[-1] + eps)
    y = y if weight is None else y * weight
    return (y if gate is None else y * _activated(gate, activation),)


def causal_conv1d(
    rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state=None, activation=None
) -> tuple[Tensor, Tensor]:
    """A window of inputs that moves a token at a time."""
    inputs, before = rows.split(x).unbind(1), weight.shape[1] - 1
    window = x.new_zeros(rows.count, before, x.shape[2]) if initial_state is None else initial_state

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        seen = torch.cat([state[0], inputs[t][:, None]], 1)
        z = (seen * weight.mT).sum(1)
        z = z if bias is None else z + bias
        return (seen[:, 1:],), _activated(z, "silu") if activation else z

    y, (last,) = rows.walk((window,), step, rows.split(x)[:, :0])
    return y, last


def intra_chunk(
    rows: Rows, q, k, v, g=None, states=None, gate=None, chunk_size=64, scale=None, gate_activation="silu"
) -> tuple[Tensor]:
    """Each chunk from the state that enters it, a step at a time, all chunks at once."""
    batch, length, heads, width = v.shape
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    chunks = -(-length // chunk_size)

    def cut(x: Tensor) -> Tensor:
        more = x.new_zeros(batch, chunks * chunk_size - length, *x.shape[2:])
        return torch.cat([x, more], 1).reshape(batch * chunks, chunk_size, *x.shape[2:])

    q, k, v = cut(per_value_head(q, heads)), cut(per_value_head(k, heads)), cut(v)
    kept = None if g is None else cut(g).exp()
    S = v.new_zeros(batch * chunks, heads, k.shape[-1], width) if states is None else states.flatten(0, 1)
    outputs: list[Any] = []
    for t in range(chunk_size if chunks else 0):
        if kept is not None:
            S = kept[:, t, :, None, None] * S
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * (q[:, t, :, None, :] @ S)[..., 0, :])
    o = (
        torch.stack(outputs, 1).reshape(batch, chunks * chunk_size, heads, width)[:, :length]
        if outputs
        else v.new_zeros(batch, length, heads, width)
    )
    return (o if gate is None else o * _activated(gate, gate_activation),)
