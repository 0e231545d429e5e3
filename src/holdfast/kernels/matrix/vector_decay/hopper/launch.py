"""Launches of the vector decay's kernels on Hopper: descriptors of tensors and grids."""

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.compat import gl
from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, Sums, kind
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import aligned, tileable, tiles, width_of
from holdfast.recurrences.definition import MatrixCall

from .backward_grads import gla_gradients
from .forward import gla_sweep

DECAYS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
# of rows that one instruction reads: a thread finds all of its numbers beside one address
PLAIN_DECAYS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)


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
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
    sums: Sums | None = None,
) -> None:
    """One launch of `gla_sweep`, whose arguments these are; out's heads are a multiple of those of q, k, g and v."""
    batch, length, heads, values = out.shape
    keys = g.shape[3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide, tall = width_of(keys), width_of(values)
    arguments = (
        tiles(k, [1, TOKENS, 1, wide], TILE_LAYOUT),
        tiles(q, [1, TOKENS, 1, wide], TILE_LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], PLAIN_DECAYS),
        tiles(v, [1, TOKENS, 1, tall], TILE_LAYOUT),
        tiles(out, [1, TOKENS, 1, tall], TILE_LAYOUT),
        None if kept is None else tiles(kept, [1, TOKENS, 1, 64], TILE_LAYOUT),
        beta,
        start,
        end,
        cu_seqlens,
        None if cu_seqlens is None else out,
        None if sums is None else sums.sums,
        length,
        heads,
        heads // k.shape[2],
        heads // g.shape[2],
        heads // v.shape[2],
        scale,
    )
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "REVERSE": reverse,
        "ADDS": sums is not None and sums.adds,
        "LEAVES": sums is not None and sums.leaves,
    }
    optional = (start, end, kept, beta, None if sums is None else sums.sums)
    types = (k.dtype, wide, tall, *(x is None for x in optional), kind(cu_seqlens))
    launch(gla_sweep, (sequences * heads, 1, 1), arguments, constants, tall // 16, types)


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
    beta: Tensor | None,
    dbeta: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """One launch of `gla_gradients`, whose arguments these are; dq, dk and dg have the heads of u."""
    batch, length, heads, keys = dq.shape
    tall, chunks = width_of(v.shape[3]), states.shape[1] // TOKENS
    across = -(-keys // 64) * heads
    grid = (across, chunks, batch) if cu_seqlens is None else (across * chunks, 1, 1)
    arguments = (
        tiles(q, [1, TOKENS, 1, 64], TILE_LAYOUT),
        tiles(k, [1, TOKENS, 1, 64], TILE_LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], DECAYS),
        tiles(v, [1, TOKENS, 1, tall], TILE_LAYOUT),
        tiles(u, [1, TOKENS, 1, tall], TILE_LAYOUT),
        tiles(states, [1, TOKENS, 1, 64], TILE_LAYOUT),
        tiles(ends, [1, TOKENS, 1, 64], TILE_LAYOUT),
        dq,
        dk,
        dg,
        beta,
        dbeta,
        cu_seqlens,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        length,
        heads // q.shape[2],
        heads // g.shape[2],
        heads // v.shape[2],
        scale,
    )
    types = (q.dtype, tall, beta is None, kind(cu_seqlens))
    launch(gla_gradients, grid, arguments, {"H": heads, "KEYS": keys}, 4, types)


def ends(dq: Tensor, dg: Tensor, states: Tensor) -> Tensor:
    """Room for the gradient of the state after each chunk: that of another gradient if it fits."""
    for gradient in (dg.view(dq.dtype), dq):
        if gradient.shape == states.shape:
            return gradient
    return torch.empty_like(states)


def inputs(call: MatrixCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, g and beta as the kernels read them, the last two in float32."""
    assert call.g is not None
    q, k, v = (tileable(x) for x in call[:3])
    beta = None if call.beta is None else aligned(call.beta.float())
    return q, k, v, tileable(call.g.float()), beta
