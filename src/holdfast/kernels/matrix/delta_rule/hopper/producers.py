"""The two warps that run ahead in the delta rule's sweeps forward in time: one copies tiles in, one has the gates."""

# ruff: noqa: RUF005 - Gluon does not compile starred expressions
from holdfast.kernels.lib.gluon.compat import barrier, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import (
    BETA,
    CHUNK,
    LOG_DECAY_CUMSUM,
    READ_DECAY,
    VECTORS,
    WRITE_DECAY,
    load_decay_beta,
)
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import add
from holdfast.kernels.lib.gluon.sequence import chunk_coords
from holdfast.kernels.lib.gluon.tails import zero_tail_tiles

# columns of v that four warps work on
COLUMNS = gl.constexpr(64)


@gluon.jit
def copy(tiles, sources, loaded, free, qk_group, numbers, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, v and A on their way into shared memory."""
    q_tiles, k_tiles, v_tiles, a_tiles, _ = tiles
    q_desc, k_desc, v_desc, a_desc = sources
    H, chunk0, count, _, aside = numbers
    keys: gl.constexpr = k_desc.block_type.nbytes * (1 if q_desc is None else 2)
    values: gl.constexpr = 0 if v_desc is None else CONSUMERS * v_desc.block_type.nbytes
    width: gl.constexpr = keys + values + a_desc.block_type.nbytes
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        batch, token = chunk_coords(aside, chunk0 + i, H)
        arrived = loaded.index(stage)
        if aside is not None:
            rows = aside[1] - (chunk0 + i) * CHUNK
            arrived = loaded.index(gl.where(rows < CHUNK, STAGES, stage))
        mbarrier.expect(arrived, width)
        tma_load(k_desc, [batch, token, head // qk_group, 0], arrived, k_tiles.index(stage))
        if q_desc is not None:
            tma_load(q_desc, [batch, token, head // qk_group, 0], arrived, q_tiles.index(stage))
        if v_desc is not None:
            for consumer in gl.static_range(CONSUMERS):
                # past v's columns, where a transition is found, it reads zeros
                column = (gl.program_id(1) * CONSUMERS + consumer) * COLUMNS
                tile = v_tiles.index(stage * CONSUMERS + consumer)
                tma_load(v_desc, [batch, token, head, column], arrived, tile)
        if i == 0:
            # the launch ahead may still be at the inverses; all else was there before it
            grid_dependency_wait()
        tma_load(a_desc, [batch * H + head, chunk0 + i, 0, 0], arrived, a_tiles.index(stage))
        if aside is not None:  # noqa: SIM102 - known while compiling
            if rows < CHUNK:
                cut = (k_tiles.index(stage),)
                if v_desc is not None:
                    for consumer in gl.static_range(CONSUMERS):
                        cut = cut + (v_tiles.index(stage * CONSUMERS + consumer),)
                zero_tail_tiles(cut, rows, arrived, loaded.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def gate(places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free: decays to each token, from it to the end, of the chunk; strengths."""
    gates, decays, _, gated, _, free = places
    _, chunk0, count, _, _ = numbers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk0, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk0 + i + 1, i + 1 < count, T)
        mbarrier.wait(free.index(stage), phase)
        total = gl.associative_scan(g, 0, add)
        whole = gl.sum(g, 0)
        gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).store(total)
        gates.index(stage * VECTORS + READ_DECAY).store(gl.exp2(total))
        gates.index(stage * VECTORS + WRITE_DECAY).store(gl.exp2(whole - total))
        gates.index(stage * VECTORS + BETA).store(beta)
        decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
        barrier()
        mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
