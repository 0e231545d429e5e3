"""The launch of all chunks at once, before the passes that Triton has."""

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, dtype_or_none
from holdfast.kernels.matrix.vector_decay.hopper.launch import DECAYS, PLAIN_DECAYS
from holdfast.kernels.matrix.vector_decay.saved import Chunks
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import for_tma, tiles

from .chunk_prepare import kda_chunk_prepare


def run_prepare(
    q: Tensor, k: Tensor, g: Tensor, scale: float, written: Chunks, slots: int, cu_seqlens: Tensor | None
) -> None:
    """Launch `kda_chunk_prepare`, which fills `written` but for the inverses.

    q, k [B, T, Hq, K] in 16 bits, g [B, T, H, K]. slots: places of all chunks.
    """
    q, k, g = for_tma(q), for_tma(k), for_tma(g.float())
    batch, length, heads, keys = g.shape
    grid = (heads, slots // batch, batch) if cu_seqlens is None else (heads * slots, 1, 1)
    block = [1, TOKENS, 1, 64]
    stored = (written.q_in, written.k_in, written.k_out, written.scores)
    arguments = (
        tiles(q, block, TILE_LAYOUT),
        tiles(k, block, TILE_LAYOUT),
        tiles(g, block, PLAIN_DECAYS),
        *(tiles(x, block, TILE_LAYOUT) for x in stored),
        tiles(written.pairs, block, DECAYS),
        written.decay,
        *(None if cu_seqlens is None else x for x in (*stored, written.pairs)),
        cu_seqlens,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        length,
        heads // q.shape[2],
        scale,
    )
    constants = {"H": heads, "KEYS": keys}
    # two blocks share an SM
    launch(kda_chunk_prepare, grid, arguments, constants, 8, (q.dtype, dtype_or_none(cu_seqlens)), 128)
