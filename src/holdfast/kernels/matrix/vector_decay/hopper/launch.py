"""Launches of vector decay's kernels on Hopper: descriptors of tensors and grids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.compat import gl
from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, SliceSums, dtype_or_none
from holdfast.kernels.matrix.variants import GradRoom
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import aligned, for_tma, round_up_columns, tiles
from holdfast.recurrences.definition import MatrixCall

from .backward_grads import gla_bwd_grads
from .forward import gla_fwd

DECAYS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
# of rows that one instruction reads: a thread finds all of its numbers beside one address
PLAIN_DECAYS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's tensors as the kernels read them, g and beta in float32.

    before_decay: whether q reads before the decay of its own token, which `run_grads` alone knows of.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    scale: float
    cu_seqlens: Tensor | None
    before_decay: bool = False

    @staticmethod
    def of(call: MatrixCall, cu_seqlens: Tensor | None) -> "Inputs":
        assert call.g is not None
        q, k, v = (for_tma(x) for x in call[:3])
        beta = None if call.beta is None else aligned(call.beta.float())
        return Inputs(q, k, v, for_tma(call.g.float()), beta, call.scale, cu_seqlens)


@dataclass(frozen=True, slots=True)
class States:
    """States before and after all chunks, [N, H, K, V] in float32, and before each chunk, of `saved_shape`; or None."""

    initial: Tensor | None
    final: Tensor | None
    saved: Tensor | None


@dataclass(frozen=True, slots=True)
class Grads:
    """Gradients that `run_grads` fills: dq, dk and dg have the heads of v; dbeta is None where beta is.

    dq and dk may have room between their tokens, the same of both: see `room_for_queries_and_keys`. Where dq is None,
    keys read: see `gla_bwd_grads`.
    """

    dq: Tensor | None
    dk: Tensor
    dg: Tensor
    dbeta: Tensor | None


def run_forward(
    inputs: Inputs, v: Tensor, out: Tensor, states: States, reverse: bool = False, sums: SliceSums | None = None
) -> None:
    """Launch `gla_fwd`; out's heads are a multiple of those of q, k, g and v, which may be other than inputs.v."""
    q, k, g, beta, cu_seqlens = inputs.q, inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens
    batch, length, heads, values = out.shape
    keys = g.shape[3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tile_k, tile_v = round_up_columns(keys), round_up_columns(values)
    arguments = (
        tiles(k, [1, TOKENS, 1, tile_k], TILE_LAYOUT),
        tiles(q, [1, TOKENS, 1, tile_k], TILE_LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], PLAIN_DECAYS),
        tiles(v, [1, TOKENS, 1, tile_v], TILE_LAYOUT),
        tiles(out, [1, TOKENS, 1, tile_v], TILE_LAYOUT),
        None if states.saved is None else tiles(states.saved, [1, TOKENS, 1, 64], TILE_LAYOUT),
        beta,
        states.initial,
        states.final,
        cu_seqlens,
        None if cu_seqlens is None else out,
        None if sums is None else sums.sums,
        length,
        heads,
        heads // k.shape[2],
        heads // g.shape[2],
        heads // v.shape[2],
        inputs.scale,
    )
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "REVERSE": reverse,
        "ADDS": sums is not None and sums.adds,
        "LEAVES": sums is not None and sums.leaves,
    }
    optional = (states.initial, states.final, states.saved, beta, None if sums is None else sums.sums)
    types = (k.dtype, tile_k, tile_v, *(x is None for x in optional), dtype_or_none(cu_seqlens))
    launch(gla_fwd, (sequences * heads, 1, 1), arguments, constants, tile_v // 16, types)


def run_grads(inputs: Inputs, do: Tensor, states: Tensor, dstates: Tensor | None, grads: Grads) -> None:
    """Launch `gla_bwd_grads`. states, dstates: before and after each chunk, of `saved_sizes`."""
    q, k, v, g, beta, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.cu_seqlens
    batch, length, heads, keys = grads.dk.shape
    tile_v, chunks = round_up_columns(v.shape[3]), states.shape[1] // TOKENS
    across = -(-keys // 64) * heads
    grid = (across, chunks, batch) if cu_seqlens is None else (across * chunks, 1, 1)
    arguments = (
        tiles(q, [1, TOKENS, 1, 64], TILE_LAYOUT),
        tiles(k, [1, TOKENS, 1, 64], TILE_LAYOUT),
        tiles(g, [1, TOKENS, 1, 64], DECAYS),
        tiles(v, [1, TOKENS, 1, tile_v], TILE_LAYOUT),
        tiles(do, [1, TOKENS, 1, tile_v], TILE_LAYOUT),
        tiles(states, [1, TOKENS, 1, 64], TILE_LAYOUT),
        None if dstates is None else tiles(dstates, [1, TOKENS, 1, 64], TILE_LAYOUT),
        grads.dq,
        grads.dk,
        grads.dg,
        beta,
        grads.dbeta,
        cu_seqlens,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        length,
        heads // q.shape[2],
        heads // g.shape[2],
        heads // v.shape[2],
        inputs.scale,
    )
    types = (q.dtype, tile_v, beta is None, dstates is None, grads.dq is None, dtype_or_none(cu_seqlens))
    constants = {"H": heads, "KEYS": keys, "TOKEN_STEP": grads.dk.stride(1), "BEFORE_DECAY": inputs.before_decay}
    launch(gla_bwd_grads, grid, arguments, constants, 4, types)


def room_for_dstates(dq: Tensor, dg: Tensor, states: Tensor) -> Tensor:
    """Return memory for the gradient of the state after each chunk: that of another gradient if it fits."""
    for gradient in (dg.view(dq.dtype), dq):
        if gradient.shape == states.shape and gradient.is_contiguous():
            return gradient
    return torch.empty_like(states)


def room_for_queries_and_keys(room: GradRoom, shape: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for dq and dk: room's where a token's heads are side by side in it, in both at one distance."""
    _, length, _, keys = shape
    for x in room[:2]:
        if x is None or x.shape != shape or x.dtype != like.dtype or x.data_ptr() % 16:
            break
        token = x.stride(1)
        if x.stride() != (length * token, token, keys, 1) or token % 8 or token != room[0].stride(1):
            break
    else:
        return room[:2]
    return tuple(torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
