"""Launches of the vector decay's kernels on Hopper: descriptors of tensors and grids."""

import torch
from torch import Tensor

from holdfast.kernels.common.gluon import gl
from holdfast.kernels.common.gluon_launch import launch, tiles
from holdfast.recurrences.definition import MatrixCall

from .hopper_gla_gradients import gla_gradients
from .hopper_gla_sweep import gla_sweep
from .hopper_launch import LAYOUT, TOKENS, tileable, width_of

DECAYS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)


def run_sweep(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    v: Tensor,
    out: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    kept: Tensor | None,
    scale: float,
    reverse: bool = False,
) -> None:
    """One launch of `gla_sweep`, whose arguments these are; g's heads are a multiple of those of q, k and v."""
    batch, length, heads, keys = g.shape
    values = v.shape[3]
    wide, tall = width_of(keys), width_of(values)
    arguments = (
        tiles(k, [1, TOKENS, 1, wide], LAYOUT),
        tiles(q, [1, TOKENS, 1, wide], LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], DECAYS),
        tiles(v, [1, TOKENS, 1, tall], LAYOUT),
        tiles(out, [1, TOKENS, 1, tall], LAYOUT),
        None if kept is None else tiles(kept, [1, TOKENS, 1, 64], LAYOUT),
        start,
        end,
        length,
        heads,
        heads // k.shape[2],
        heads // v.shape[2],
        scale,
    )
    constants = {"KEYS": keys, "VALUES": values, "REVERSE": reverse}
    types = (k.dtype, wide, tall, start is None, end is None, kept is None)
    launch(gla_sweep, (batch * heads, 1, 1), arguments, constants, tall // 16, types)


def run_gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    v: Tensor,
    u: Tensor,
    states: Tensor,
    ends: Tensor,
    dq: Tensor,
    dk: Tensor,
    dg: Tensor,
    scale: float,
) -> None:
    """One launch of `gla_gradients`, whose arguments these are; dq, dk and dg have the heads of u."""
    batch, length, heads, keys = dq.shape
    tall = width_of(v.shape[3])
    grid = (-(-keys // 64) * heads, -(-length // TOKENS), batch)
    arguments = (
        tiles(q, [1, TOKENS, 1, 64], LAYOUT),
        tiles(k, [1, TOKENS, 1, 64], LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], DECAYS),
        tiles(v, [1, TOKENS, 1, tall], LAYOUT),
        tiles(u, [1, TOKENS, 1, tall], LAYOUT),
        tiles(states, [1, TOKENS, 1, 64], LAYOUT),
        tiles(ends, [1, TOKENS, 1, 64], LAYOUT),
        dq,
        dk,
        dg,
        length,
        heads // q.shape[2],
        heads // v.shape[2],
        scale,
    )
    launch(gla_gradients, grid, arguments, {"H": heads, "KEYS": keys}, 4, (q.dtype, tall))


def ends(dq: Tensor, dg: Tensor, states: Tensor) -> Tensor:
    """Room for the gradient of the state after each chunk: that of another gradient if it fits."""
    for gradient in (dg.view(dq.dtype), dq):
        if gradient.shape == states.shape:
            return gradient
    return torch.empty_like(states)


def inputs(call: MatrixCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and g as the kernels read them, g in float32."""
    assert call.g is not None
    q, k, v = (tileable(x) for x in call[:3])
    return q, k, v, tileable(call.g.float())
