"""The warp of backward.py that loads and stores tiles, and what the kernel's partitions hand one another, under names.

It comes back to a chunk's place once the chunk's gradients are there: dq and dk are then where q and k were. The tuples
are built by name alone: a compiled kernel is cached by its functions' text, which does not have their order.
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier, reinterpret, tma_load, tma_store, tma_store_wait
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import chunk_coords
from holdfast.kernels.lib.gluon.tails import zero_tail_tiles

# chunks whose q, k and dO are in shared memory: dS goes over one while the other's gradients are found
STAGES = gl.constexpr(2)
# tiles that there is one of: the inverse, U, S, Y times beta, dS'
A_TILE, U_TILE, S_TILE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
Y_TILE, DS_TILE = gl.constexpr(3), gl.constexpr(4)
TILES = gl.constexpr(5)


class Tiles(NamedTuple):
    """Tiles in shared memory: STAGES of q, k [64, K] and do [64, V], one of each other.

    a: [64, 64], the chunk's inverse. u, y: [64, V]; y is Y times beta. s, ds: [V, K], S that enters the chunk and dS'
    that leaves it.
    """

    q: Any
    k: Any
    do: Any
    a: Any
    u: Any
    s: Any
    y: Any
    ds: Any


class Descs(NamedTuple):
    """Descriptors of what is loaded; low and high have the states."""

    q: Any
    k: Any
    do: Any
    a: Any
    u: Any
    low: Any
    high: Any


class Grads(NamedTuple):
    """Where gradients go: by descriptors, None for dq and dk in float32, and by pointers."""

    dq_desc: Any
    dk_desc: Any
    dv_desc: Any
    dq: Any
    dk: Any
    dv: Any
    dbeta: Any


class Stages(NamedTuple):
    """What partitions hand one another of each chunk, STAGES of each, and their barriers.

    decays, state_grad_dot, small_betas: backward_decay.py's. stage_ready: q, k and dO are there; one barrier more than
    stages, where a chunk that ends in another sequence arrives first. dstate_ready: <S, dS'> is there, and the warps
    that carry dS have read q and k. stage_empty: the gradients are there. tile_ready, tile_empty: one each for the
    TILES that there is one of.
    """

    decays: Any
    state_grad_dot: Any
    small_betas: Any
    stage_ready: Any
    decays_ready: Any
    dstate_ready: Any
    stage_empty: Any
    tile_ready: Any
    tile_empty: Any


class Chunks(NamedTuple):
    """A block's chunks, `count` from `first` on, and T, where its sequence ends.

    packed: (shift, end) of a packed sequence, else None. origin: the token where all chunks begin, int64.
    """

    T: Any
    H: Any
    first: Any
    count: Any
    scale: Any
    packed: Any
    origin: Any


@gluon.jit
def state_block(matrix, row: gl.constexpr, column: gl.constexpr, layout: gl.constexpr):
    """Return 64 rows and 64 columns of a matrix in shared memory, which lie together there, as a tile."""
    rows: gl.constexpr = matrix.shape[0] // 64
    blocks: gl.constexpr = rows * (matrix.shape[1] // 64)
    tiles = reinterpret(matrix, matrix.dtype, [blocks, 1, 64, 1, 64], layout)
    return tiles.index(column * rows + row)


@gluon.jit
def load_partition(tiles, descs, grads, stages, qk_group, chunks):
    """Load q, k and dO of two chunks ahead and A, U and S of one, and store dq and dk of a chunk that is done."""
    H, count, packed = chunks.H, chunks.count, chunks.packed
    parts: gl.constexpr = descs.k.block_type.shape[3] // 64
    halves: gl.constexpr = tiles.s.shape[1] // 64
    layout: gl.constexpr = descs.low.layout
    width: gl.constexpr = 2 * descs.k.block_type.nbytes + descs.do.block_type.nbytes
    head = gl.program_id(0) % H
    own = head // qk_group
    stage = 0
    phase = 1
    parity = 1
    for i in range(count + STAGES):
        mbarrier.wait(stages.stage_empty.index(stage), phase)
        chunk = chunks.first + count - 1 - i
        if grads.dq_desc is not None:
            batch, token = chunk_coords(packed, chunk + STAGES, H)
            # the rows of a chunk that ends in another sequence are stored by grad_partition
            if i >= STAGES and (packed is None or packed.end >= (chunk + STAGES + 1) * CHUNK):
                tma_store(grads.dq_desc, [batch, token, head, 0], tiles.q.index(stage))
                tma_store(grads.dk_desc, [batch, token, head, 0], tiles.k.index(stage))
                tma_store_wait(0)
        if i < count:
            batch, token = chunk_coords(packed, chunk, H)
            row = chunk * CHUNK
            arrived = stages.stage_ready.index(stage)
            if packed is not None:
                arrived = stages.stage_ready.index(gl.where(packed.end - row < CHUNK, STAGES, stage))
            mbarrier.expect(arrived, width)
            tma_load(descs.k, [batch, token, own, 0], arrived, tiles.k.index(stage))
            tma_load(descs.q, [batch, token, own, 0], arrived, tiles.q.index(stage))
            tma_load(descs.do, [batch, token, head, 0], arrived, tiles.do.index(stage))
            if packed is not None:  # noqa: SIM102 - known while compiling
                if packed.end - row < CHUNK:
                    cut = (tiles.q.index(stage), tiles.k.index(stage), tiles.do.index(stage))
                    zero_tail_tiles(cut, packed.end - row, arrived, stages.stage_ready.index(stage))
            ready, empty = stages.tile_ready, stages.tile_empty
            mbarrier.wait(empty.index(A_TILE), parity)
            mbarrier.expect(ready.index(A_TILE), descs.a.block_type.nbytes)
            tma_load(descs.a, [batch * H + head, chunk, 0, 0], ready.index(A_TILE), tiles.a.index(0))
            mbarrier.wait(empty.index(U_TILE), parity)
            mbarrier.expect(ready.index(U_TILE), descs.u.block_type.nbytes)
            tma_load(descs.u, [batch, row, head, 0], ready.index(U_TILE), tiles.u.index(0))
            mbarrier.wait(empty.index(S_TILE), parity)
            mbarrier.expect(ready.index(S_TILE), parts * halves * descs.low.block_type.nbytes)
            for part in gl.static_range(parts):
                tile = state_block(tiles.s.index(0), 0, part, layout)
                tma_load(descs.low, [batch, row, head, 64 * part], ready.index(S_TILE), tile)
                if halves == 2:
                    tile = state_block(tiles.s.index(0), 1, part, layout)
                    tma_load(descs.high, [batch, row, head, 64 * part], ready.index(S_TILE), tile)
        parity ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
