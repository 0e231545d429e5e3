"""The warps that run ahead in the delta rule's kernels forward in time, one for loads, one for decays; named arguments.

The tuples are built by name alone: a compiled kernel is cached by its functions' text, which does not have their order.
"""

# ruff: noqa: RUF005 - Gluon does not compile starred expressions
from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier, tma_load
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

# columns of v that an MMA warpgroup works on
COLUMNS = gl.constexpr(64)


class Tiles(NamedTuple):
    """Tiles of the chunks in flight in shared memory, STAGES of each; None for what a launch does not have.

    q, k: [64, K]. v: [64, 64], one for each MMA warpgroup. a: [64, 64], the chunk's inverse. scores: [64, 64], of
    queries and keys.
    """

    q: Any
    k: Any
    v: Any
    a: Any
    scores: Any


class Descs(NamedTuple):
    """Descriptors of what is loaded; q and v may be None."""

    q: Any
    k: Any
    v: Any
    a: Any


class Stages(NamedTuple):
    """Decays of the chunks in flight, in shared memory, and the barriers between partitions, one a stage.

    decays: VECTORS of 64 tokens a stage, by the indices of lib/gluon/decay.py. chunk_decay: one number a stage.
    tiles_ready has one barrier more than stages: a chunk that ends in another sequence arrives there first, and is
    ready when the other's rows are 0. stage_empty counts the partitions that read tiles.
    """

    decays: Any
    chunk_decay: Any
    tiles_ready: Any
    decays_ready: Any
    scores_ready: Any
    stage_empty: Any


class Chunks(NamedTuple):
    """A block's chunks, `count` from `first` on; of packed sequences chunks count as in lib/gluon/sequence.py.

    packed: (shift, end) of a packed sequence, how far its tokens are from its chunks' places, and the last one's end.
    """

    H: Any
    first: Any
    count: Any
    scale: Any
    packed: Any


class DecayInputs(NamedTuple):
    """Pointers to this block's head of the log decays and betas, or None, with their strides of tokens; T ends them."""

    g: Any
    beta: Any
    g_t: Any
    beta_t: Any
    T: Any


@aggregate
class Sizes:
    """Constants of a launch, by the names that its kernel has them under."""

    KEYS: gl.constexpr
    VALUES: gl.constexpr
    MMA_WARPGROUPS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, KEYS, VALUES, MMA_WARPGROUPS, STAGES):
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.MMA_WARPGROUPS = gl.constexpr(MMA_WARPGROUPS)
        self.STAGES = gl.constexpr(STAGES)


@gluon.jit
def init_barriers(stages, readers: gl.constexpr, STAGES: gl.constexpr):
    """Initialise a kernel's barriers; `readers` partitions read each stage's tiles."""
    for i in gl.static_range(STAGES):
        mbarrier.init(stages.tiles_ready.index(i), count=1)
        mbarrier.init(stages.decays_ready.index(i), count=1)
        if stages.scores_ready is not None:
            mbarrier.init(stages.scores_ready.index(i), count=1)
        mbarrier.init(stages.stage_empty.index(i), count=readers)
    mbarrier.init(stages.tiles_ready.index(STAGES), count=1)
    fence_async_shared()


@gluon.jit
def load_partition(
    tiles, descs, tiles_ready, stage_empty, qk_group, chunks, MMA_WARPGROUPS: gl.constexpr, STAGES: gl.constexpr
):
    """Load q, k, v and A of each chunk as soon as its stage is empty."""
    keys: gl.constexpr = descs.k.block_type.nbytes * (1 if descs.q is None else 2)
    values: gl.constexpr = 0 if descs.v is None else MMA_WARPGROUPS * descs.v.block_type.nbytes
    width: gl.constexpr = keys + values + descs.a.block_type.nbytes
    packed = chunks.packed
    head = gl.program_id(0) % chunks.H
    stage = 0
    phase = 1
    for i in range(chunks.count):
        mbarrier.wait(stage_empty.index(stage), phase)
        batch, token = chunk_coords(packed, chunks.first + i, chunks.H)
        arrived = tiles_ready.index(stage)
        if packed is not None:
            rows = packed.end - (chunks.first + i) * CHUNK
            arrived = tiles_ready.index(gl.where(rows < CHUNK, STAGES, stage))
        mbarrier.expect(arrived, width)
        tma_load(descs.k, [batch, token, head // qk_group, 0], arrived, tiles.k.index(stage))
        if descs.q is not None:
            tma_load(descs.q, [batch, token, head // qk_group, 0], arrived, tiles.q.index(stage))
        if descs.v is not None:
            for warpgroup in gl.static_range(MMA_WARPGROUPS):
                # past v's columns, where a transition is found, it reads zeros
                column = (gl.program_id(1) * MMA_WARPGROUPS + warpgroup) * COLUMNS
                tile = tiles.v.index(stage * MMA_WARPGROUPS + warpgroup)
                tma_load(descs.v, [batch, token, head, column], arrived, tile)
        if i == 0:
            # the launch ahead may still be writing the inverses; all else was there before it
            grid_dependency_wait()
        tma_load(descs.a, [batch * chunks.H + head, chunks.first + i, 0, 0], arrived, tiles.a.index(stage))
        if packed is not None:  # noqa: SIM102 - known while compiling
            if rows < CHUNK:
                cut = (tiles.k.index(stage),)
                if descs.v is not None:
                    for warpgroup in gl.static_range(MMA_WARPGROUPS):
                        cut = cut + (tiles.v.index(stage * MMA_WARPGROUPS + warpgroup),)
                zero_tail_tiles(cut, rows, arrived, tiles_ready.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def publish_chunk(stages, stage, g, beta):
    """Store a chunk's cumulative log decay, its decays from the start and to the end, beta, and the chunk's decay."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    cumsum = gl.associative_scan(g, 0, add)
    total = gl.sum(g, 0)
    stages.decays.index(stage * VECTORS + LOG_DECAY_CUMSUM).store(cumsum)
    stages.decays.index(stage * VECTORS + READ_DECAY).store(gl.exp2(cumsum))
    stages.decays.index(stage * VECTORS + WRITE_DECAY).store(gl.exp2(total - cumsum))
    stages.decays.index(stage * VECTORS + BETA).store(beta)
    stages.chunk_decay.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(total))
    barrier()
    mbarrier.arrive(stages.decays_ready.index(stage), count=1)


@gluon.jit
def decay_partition(stages, inputs, chunks, STAGES: gl.constexpr):
    """Publish each chunk's decays when its stage is empty; its numbers are loaded a chunk ahead."""
    first, count = chunks.first, chunks.count
    stage = 0
    phase = 1
    g, beta = load_decay_beta(inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, first, count > 0, inputs.T)
    for i in range(count):
        next_chunk = first + i + 1
        g_next, beta_next = load_decay_beta(
            inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, next_chunk, i + 1 < count, inputs.T
        )
        mbarrier.wait(stages.stage_empty.index(stage), phase)
        publish_chunk(stages, stage, g, beta)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
