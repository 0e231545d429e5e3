"""The delta rule on Hopper with keys of more than 128 columns: states and outputs, and backward gradients of states.

Rows of such a state cannot be cut apart, since each write reads them all. So a block owns a (batch, head, 64 of v's
columns): four warps hold S^T [64, 256] in their registers, and its rounded copy, which products read, is in shared
memory. Inverses come from triton/chunk_inverse.py; the states, and backward in time their gradients, are what
triton/chunk_grads.py needs of each chunk. The equations are those of triton/states.py.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS, load_decay_beta
from holdfast.kernels.lib.gluon.sequence import PackedBounds, chunk_coords, packed_sequence, sequence_offset
from holdfast.kernels.lib.gluon.tails import zero_tail_tiles
from holdfast.kernels.matrix.delta_rule.hopper.forward import Output, StateIO, score_partition
from holdfast.kernels.matrix.delta_rule.hopper.producers import (
    Chunks,
    DecayInputs,
    Descs,
    Sizes,
    Stages,
    Tiles,
    init_barriers,
    publish_chunk,
)

from .mma import Saved, dstate_partition, mma_partition

# columns of v that a block works on
COLUMNS = gl.constexpr(64)


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "qk_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "first_chunk",
        "window",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr", "cu_ptr"],
)
def delta_rule_wide_states(
    k_desc,
    q_desc,
    v_desc,
    a_desc,
    o_desc,
    saved_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    cu_ptr,
    o_ptr,
    T,
    H,
    qk_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    first_chunk,
    window,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    BACK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices): `window` chunks from first_chunk on. If sequences are packed, (N * H, slices): all chunks.

    | tensor | shape | how |
    | --- | --- | --- |
    | k | [B, T, H / qk_group, KEYS] | descriptor, blocks [1, 64, 1, columns] |
    | q | as k, or None for states alone | descriptor, as k |
    | v | [B, T, H, VALUES]; with BACK the output's gradient | descriptor, blocks [1, 64, 1, 64] |
    | a | [B, T, H, 64] | descriptor, blocks [1, 64, 1, 64] |
    | o | as v, or None for states alone and with BACK | descriptor, blocks [1, 64, 1, 64]; if packed pointer too |
    | saved | [B * window, H, VALUES, KEYS], or None | descriptor, blocks [1, 1, 64, 256] |
    | g, beta | [B, T, H], or None for 0 and 1 | pointer, strides |
    | start, end | [B, H, KEYS, VALUES], or None | pointer, float32 |
    | cu | [N + 1], or None | pointer |

    BACK: chunks go from the last to the first, and the states are gradients of states. start, end: the state before and
    after the chunks; backward in time after and before them. saved: the rounded state before each chunk, or with BACK
    after it; of packed sequences, which begin and end where cu says, chunks count as in lib/gluon/sequence.py.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, CHUNK], a_desc.layout)
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, COLUMNS, K], k_desc.layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    chunk_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if q_desc is None:
        q_tiles: gl.constexpr = None
        score_tiles: gl.constexpr = None
        readers: gl.constexpr = 1
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        score_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, CHUNK], a_desc.layout)
        readers: gl.constexpr = 2
    if o_desc is None:
        o_tile: gl.constexpr = None
    else:
        o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, COLUMNS], o_desc.layout)
    stages = Stages(
        decays=decays,
        chunk_decay=chunk_decay,
        tiles_ready=tiles_ready,
        decays_ready=decays_ready,
        scores_ready=scores_ready,
        stage_empty=stage_empty,
    )
    init_barriers(stages, readers, STAGES)

    if cu_ptr is None:
        packed: gl.constexpr = None
        first = first_chunk
        count = gl.minimum(window, gl.cdiv(T, CHUNK) - first_chunk)
        slot = gl.program_id(0) // H * window
    else:
        first, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        packed = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - first
        slot = first
    if g_ptr is not None:
        g_ptr += sequence_offset(packed, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(packed, H, beta_b, beta_t, beta_h)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, a=a_tiles, scores=score_tiles)
    descs = Descs(q=q_desc, k=k_desc, v=v_desc, a=a_desc)
    saved = Saved(tile=s_tile, desc=saved_desc, slot=slot)
    output = Output(desc=o_desc, ptr=o_ptr)
    states = StateIO(start=start_ptr, end=end_ptr, transition=None, last=None)
    chunks = Chunks(H=H, first=first, count=count, scale=scale, packed=packed)
    inputs = DecayInputs(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t, T=T)
    sizes = Sizes(KEYS, VALUES, 1, STAGES)
    loads = (tiles, descs, tiles_ready, stage_empty, qk_group, chunks, BACK, STAGES)
    published = (stages, inputs, chunks, BACK, STAGES)
    if BACK:
        gl.warp_specialize(
            [
                (dstate_partition, (tiles, saved, stages, states, chunks, sizes)),
                (score_partition, (tiles, stages, chunks, STAGES)),
                (_load_partition, loads),
                (_decay_partition, published),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )
    elif q_desc is None:
        gl.warp_specialize(
            [
                (mma_partition, (tiles, None, saved, stages, output, states, chunks, sizes)),
                (_load_partition, loads),
                (_decay_partition, published),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (tiles, o_tile, saved, stages, output, states, chunks, sizes)),
                (score_partition, (tiles, stages, chunks, STAGES)),
                (_load_partition, loads),
                (_decay_partition, published),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def _load_partition(tiles, descs, tiles_ready, stage_empty, qk_group, chunks, BACK: gl.constexpr, STAGES: gl.constexpr):
    """Load k, v, A and q of each chunk as soon as its stage is empty."""
    packed = chunks.packed
    keys: gl.constexpr = descs.k.block_type.nbytes * (1 if descs.q is None else 2)
    width: gl.constexpr = keys + descs.v.block_type.nbytes + descs.a.block_type.nbytes
    head = gl.program_id(0) % chunks.H
    column = gl.program_id(1) * COLUMNS
    stage = 0
    phase = 1
    for i in range(chunks.count):
        mbarrier.wait(stage_empty.index(stage), phase)
        chunk = chunks.first + (chunks.count - 1 - i if BACK else i)
        batch, token = chunk_coords(packed, chunk, chunks.H)
        arrived = tiles_ready.index(stage)
        if packed is not None:
            rows = packed.end - chunk * CHUNK
            arrived = tiles_ready.index(gl.where(rows < CHUNK, STAGES, stage))
        mbarrier.expect(arrived, width)
        tma_load(descs.k, [batch, token, head // qk_group, 0], arrived, tiles.k.index(stage))
        tma_load(descs.v, [batch, token, head, column], arrived, tiles.v.index(stage))
        tma_load(descs.a, [batch, token, head, 0], arrived, tiles.a.index(stage))
        if descs.q is not None:
            tma_load(descs.q, [batch, token, head // qk_group, 0], arrived, tiles.q.index(stage))
        if packed is not None:  # noqa: SIM102 - known while compiling
            if rows < CHUNK:
                cut = (tiles.k.index(stage), tiles.v.index(stage), tiles.a.index(stage))
                if descs.q is not None:
                    cut = cut + (tiles.q.index(stage),)
                zero_tail_tiles(cut, rows, arrived, tiles_ready.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _decay_partition(stages, inputs, chunks, BACK: gl.constexpr, STAGES: gl.constexpr):
    """Publish each chunk's decays when its stage is empty, in either direction; loads are a chunk ahead."""
    stage = 0
    phase = 1
    chunk = chunks.first + (chunks.count - 1 if BACK else 0)
    step: gl.constexpr = -1 if BACK else 1
    g, beta = load_decay_beta(inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, chunk, chunks.count > 0, inputs.T)
    for i in range(chunks.count):
        chunk += step
        g_next, beta_next = load_decay_beta(
            inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, chunk, i + 1 < chunks.count, inputs.T
        )
        mbarrier.wait(stages.stage_empty.index(stage), phase)
        publish_chunk(stages, stage, g, beta)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
