"""The two warps that run ahead in backward.py: one copies tiles in and out, one sums log decays.

Both come back to a chunk's place once its gradients are found: then dq and dk are where its q and k were, and its log
decays' gradients only have to be summed.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta
from holdfast.kernels.lib.gluon.reduce import add
from holdfast.kernels.lib.gluon.sequence import chunk_coords
from holdfast.kernels.lib.gluon.tails import zero_tail_tiles

# strengths up to it are weak
WEAK = gl.constexpr(0.01)
# vectors of a chunk: cumulative log decay, strength, and what earlier tokens of a pair have of its decay's gradient;
# once the chunk's gradients are found, what is written of its decays' gradient and what later tokens have of it are in
# place of the first two
TOTAL, STRENGTH, EARLIER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
VECTORS = gl.constexpr(3)
# chunks whose q, k and dO are in shared memory: one is walked over while the other's gradients are found
STAGES = gl.constexpr(2)
# tiles that there is one of, full or empty: the inverse, U, S, Y times beta, dS'
A_TILE, U_TILE, S_TILE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
Y_TILE, DS_TILE = gl.constexpr(3), gl.constexpr(4)
TILES = gl.constexpr(5)
# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
LOG_ZERO = gl.constexpr(-149.9)


@gluon.jit
def square(matrix, row: gl.constexpr, column: gl.constexpr, layout: gl.constexpr):
    """Of a matrix in shared memory 64 rows and 64 columns, which lie together there, as a tile."""
    rows: gl.constexpr = matrix.shape[0] // 64
    squares: gl.constexpr = rows * (matrix.shape[1] // 64)
    tiles = reinterpret(matrix, matrix.dtype, [squares, 1, 64, 1, 64], layout)
    return tiles.index(column * rows + row)


@gluon.jit
def copy(tiles, sources, results, places, qk_group, numbers):
    """Keeps two chunks of q, k and dO, and one of A, U and S, on their way into shared memory; sends dq and dk off."""
    q_tiles, k_tiles, do_tiles, a_tiles, u_tiles, s_tiles, _, _ = tiles
    q_desc, k_desc, do_desc, a_desc, u_desc, low_desc, high_desc = sources
    dq_desc, dk_desc, _, _, _, _, _ = results
    _, _, _, loaded, _, _, free, full, empty = places
    _, H, chunk0, count, _, aside, _ = numbers
    parts: gl.constexpr = k_desc.block_type.shape[3] // 64
    halves: gl.constexpr = s_tiles.shape[1] // 64
    layout: gl.constexpr = low_desc.layout
    width: gl.constexpr = 2 * k_desc.block_type.nbytes + do_desc.block_type.nbytes
    head = gl.program_id(0) % H
    own = head // qk_group
    stage = 0
    phase = 1
    turn = 1
    for i in range(count + STAGES):
        mbarrier.wait(free.index(stage), phase)
        chunk = chunk0 + count - 1 - i
        if dq_desc is not None:
            batch, token = chunk_coords(aside, chunk + STAGES, H)
            # of what ends in another sequence the warps that find gradients write the rows
            if i >= STAGES and (aside is None or aside[1] >= (chunk + STAGES + 1) * CHUNK):
                tma_store(dq_desc, [batch, token, head, 0], q_tiles.index(stage))
                tma_store(dk_desc, [batch, token, head, 0], k_tiles.index(stage))
                tma_store_wait(0)
        if i < count:
            batch, token = chunk_coords(aside, chunk, H)
            row = chunk * CHUNK
            arrived = loaded.index(stage)
            if aside is not None:
                arrived = loaded.index(gl.where(aside[1] - row < CHUNK, STAGES, stage))
            mbarrier.expect(arrived, width)
            tma_load(k_desc, [batch, token, own, 0], arrived, k_tiles.index(stage))
            tma_load(q_desc, [batch, token, own, 0], arrived, q_tiles.index(stage))
            tma_load(do_desc, [batch, token, head, 0], arrived, do_tiles.index(stage))
            if aside is not None:  # noqa: SIM102 - known while compiling
                if aside[1] - row < CHUNK:
                    cut = (q_tiles.index(stage), k_tiles.index(stage), do_tiles.index(stage))
                    zero_tail_tiles(cut, aside[1] - row, arrived, loaded.index(stage))
            mbarrier.wait(empty.index(A_TILE), turn)
            mbarrier.expect(full.index(A_TILE), a_desc.block_type.nbytes)
            tma_load(a_desc, [batch * H + head, chunk, 0, 0], full.index(A_TILE), a_tiles.index(0))
            mbarrier.wait(empty.index(U_TILE), turn)
            mbarrier.expect(full.index(U_TILE), u_desc.block_type.nbytes)
            tma_load(u_desc, [batch, row, head, 0], full.index(U_TILE), u_tiles.index(0))
            mbarrier.wait(empty.index(S_TILE), turn)
            mbarrier.expect(full.index(S_TILE), parts * halves * low_desc.block_type.nbytes)
            for part in gl.static_range(parts):
                tile = square(s_tiles.index(0), 0, part, layout)
                tma_load(low_desc, [batch, row, head, 64 * part], full.index(S_TILE), tile)
                if halves == 2:
                    tile = square(s_tiles.index(0), 1, part, layout)
                    tma_load(high_desc, [batch, row, head, 64 * part], full.index(S_TILE), tile)
        turn ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def gate(places, g_ptr, beta_ptr, g_t, beta_t, dg_ptr, numbers):
    """Sums each chunk's log decays when its stage is free, and their gradients when it comes back."""
    gates, crossings, weak, _, gated, _, free, _, _ = places
    T, H, chunk0, count, _, _, origin = numbers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    last = chunk0 + count - 1
    if dg_ptr is not None:
        dg_ptr += origin * H + gl.program_id(0) % H
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, last, count > 0, T)
    for i in range(count + STAGES):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, last - 1 - i, i + 1 < count, T)
        mbarrier.wait(free.index(stage), phase)
        totals = gates.index(stage * VECTORS + TOTAL)
        strengths = gates.index(stage * VECTORS + STRENGTH)
        if dg_ptr is not None:  # noqa: SIM102 - known while compiling
            if i >= STAGES:
                found = last + STAGES - i
                log = load_decay_beta(g_ptr, None, g_t, 0, found, True, T)[0]
                # of each token's decay: what reads past it, and what is written before it and reaches the end
                dg = strengths.load(layout) - gates.index(stage * VECTORS + EARLIER).load(layout)
                written = totals.load(layout)
                dg = gl.associative_scan(dg, 0, add, reverse=True) + gl.associative_scan(written, 0, add) - written
                dg += crossings.index(stage).load(layout)
                tokens = found * CHUNK + gl.arange(0, CHUNK, layout)
                dg = gl.where(log < LOG_ZERO, 0.0, dg)
                gl.store(dg_ptr + tokens.to(gl.int64) * H, dg, mask=tokens < T)
                barrier()
        if i < count:
            totals.store(gl.associative_scan(g, 0, add))
            strengths.store(beta)
            is_weak = gl.where((beta <= WEAK) & (beta >= -WEAK), 1, 0)
            weak.index(stage).store(gl.full([1], 1, gl.int32, layout) * gl.sum(is_weak, 0))
            barrier()
            mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
