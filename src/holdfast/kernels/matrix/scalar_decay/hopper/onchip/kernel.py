"""forward.py's sweep in one launch for few heads, each block's part of a sequence on chip from first to last.

A sequence is cut into segments of 256 tokens, whose tiles a block holds. It finds what its segment adds to the state;
blocks exchange that through memory, and each scans some of the state's cells over all segments of a head
(exchange.py). Meanwhile it finds its outputs as if the segment began with a state of zero, and adds
what comes from the state that enters it when that is there (mma.py).

All blocks have to run at once: the launch is cooperative, and fails where they cannot.
"""

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import head_offset
from holdfast.planner.models.matrix.scalar_decay.hopper import RESIDENT_CHUNKS

from .exchange import load_partition
from .mma import mma_partition

# chunks of a segment, as queries; keys and values come in halves of a segment
CHUNKS = gl.constexpr(RESIDENT_CHUNKS)
_HALF = gl.constexpr(128)


@gluon.jit(
    do_not_specialize=["T", "H", "qk_group", "v_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "decay_ptr"],
)
def scalar_decay_fwd_onchip(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    states_desc,
    states_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    decay_ptr,
    T,
    H,
    qk_group,
    v_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Grid (B * H, segments of 256 tokens), all blocks at once.

    q, o: [B, T, H / qk_group, KEYS] and [B, T, H, VALUES], by descriptors of blocks [1, 64, 1, columns]; k and v, [B,
    T, H / v_group, VALUES], of [1, 128, 1, columns].
    start: state before the sequence, float32 [B, H, KEYS, VALUES], or None. end: after it.
    states: memory for [2, B, H, segments, K, V], K and V as wide as tiles: what each segment adds to the state, and the
    state that enters it. decay: for float32 [B, H, segments], what remains of a state after a segment.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [CHUNKS, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, 1, _HALF, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 1, _HALF, 1, V], v_desc.layout)
    # scores of two chunks; before and after them a state
    scores = gl.allocate_shared_memory(dtype, [2, _HALF, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    totals = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK], flat)
    wholes = gl.allocate_shared_memory(gl.float32, [CHUNKS], flat)
    if beta_ptr is None:
        strengths: gl.constexpr = None
    else:
        strengths = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK], flat)
        beta_ptr += head_offset(H, beta_b, beta_h)
    if g_ptr is not None:
        g_ptr += head_offset(H, g_b, g_h)
    # k and v of each half, q of each chunk; the gates; the state that enters
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    entered = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    # the scores' memory: holds the segment's own state, is free of it, and free of scores
    added = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=1)
    for i in gl.static_range(CHUNKS):
        mbarrier.init(asked.index(i), count=1)
    mbarrier.init(gated.index(0), count=1)
    mbarrier.init(entered.index(0), count=1)
    mbarrier.init(added.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    mbarrier.init(scored.index(0), count=1)
    fence_async_shared()

    tiles = (q_tiles, k_tiles, v_tiles, scores)
    gates = (totals, wholes, strengths)
    signals = (written, asked, gated, entered, added, taken, scored)
    gl.warp_specialize(
        [
            (mma_partition, (tiles, gates, signals, o_desc, states_desc, H, scale)),
            (
                load_partition,
                (
                    tiles,
                    gates,
                    signals,
                    (q_desc, k_desc, v_desc, states_desc),
                    (g_ptr, beta_ptr, start_ptr, end_ptr, states_ptr, decay_ptr),
                    (T, H, qk_group, v_group, g_t, beta_t),
                    KEYS,
                    VALUES,
                ),
            ),
        ],
        [4],
        [72],
    )
