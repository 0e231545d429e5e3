"""forward.py's recurrence in one launch for few heads, each block's part of a sequence on chip from first to last.

A sequence is cut into segments of 256 tokens, whose tiles a block holds. It finds what its segment adds to the state;
blocks exchange that through memory, and each scans some of the state's cells over all segments of a head
(exchange.py). Meanwhile it finds its outputs as if the segment began with a state of zero, and adds
what comes from the state that enters it when that is there (mma.py).

All blocks have to run at once: the launch is cooperative, and fails where they cannot.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import head_offset
from holdfast.planner.models.matrix.scalar_decay.hopper import RESIDENT_CHUNKS

from .exchange import load_partition
from .mma import mma_partition

# chunks of a segment, as queries; keys and values come in halves of a segment
CHUNKS = gl.constexpr(RESIDENT_CHUNKS)
_HALF = gl.constexpr(128)


class Tiles(NamedTuple):
    """A segment in shared memory: q by chunks, k and v by halves, and scores of two chunks, or a state."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor


class Decays(NamedTuple):
    """Per token the log decay cumsum within its chunk, per chunk its log decay, and per token beta or None."""

    cumsum: gl.shared_memory_descriptor
    chunk: gl.shared_memory_descriptor
    beta: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """kv_ready, q_ready, decays_ready, entry_ready: load -> mma. The others are about the memory of the scores.

    sum_ready: mma -> load, it holds what the segment adds to the state. sum_empty: load -> mma, that has been stored.
    scores_empty: mma -> load, the state that enters the segment may come.
    """

    kv_ready: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    decays_ready: gl.shared_memory_descriptor
    entry_ready: gl.shared_memory_descriptor
    sum_ready: gl.shared_memory_descriptor
    sum_empty: gl.shared_memory_descriptor
    scores_empty: gl.shared_memory_descriptor


class Descriptors(NamedTuple):
    """What the load partition copies in, and the states, which it copies out too."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    states: gl.tensor


class Pointers(NamedTuple):
    """The load partition's: scalar_decay_fwd_onchip's arguments of these names."""

    g: gl.tensor
    beta: gl.tensor
    start: gl.tensor
    end: gl.tensor
    states: gl.tensor
    decay: gl.tensor


class Sizes(NamedTuple):
    """Tokens, heads of v, how many of them share one of q and k and one of v, and strides of tokens."""

    T: gl.tensor
    H: gl.tensor
    qk_group: gl.tensor
    v_group: gl.tensor
    g_t: gl.tensor
    beta_t: gl.tensor


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

    read by load:
        q       [B, T, H / qk_group, KEYS], through a descriptor of blocks [1, 64, 1, columns]
        k, v    [B, T, H / qk_group, KEYS], [B, T, H / v_group, VALUES], of blocks [1, 128, 1, columns]
        g, beta [B, T, H], by strides, or None
        start   float32 [B, H, KEYS, VALUES]: the state before the sequence; or None for 0
    written by load:
        end     as start: the state after the sequence
        states  [2, B, H, segments, K, V], K and V as wide as tiles, by pointer and descriptor: what each segment adds
                to the state, and the state that enters it
        decay   float32 [B, H, segments]: what remains of a state after a segment
    written by mma:
        o       [B, T, H, VALUES], through a descriptor of blocks [1, 64, 1, columns]
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
    cumsum = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK], flat)
    chunk_decay = gl.allocate_shared_memory(gl.float32, [CHUNKS], flat)
    if beta_ptr is None:
        beta_tile: gl.constexpr = None
    else:
        beta_tile = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK], flat)
        beta_ptr += head_offset(H, beta_b, beta_h)
    if g_ptr is not None:
        g_ptr += head_offset(H, g_b, g_h)
    # k and v of each half, q of each chunk; the gates; the state that enters
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    entry_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    # the scores' memory: holds the segment's own state, is free of it, and free of scores
    sum_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    sum_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    scores_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
    for i in gl.static_range(CHUNKS):
        mbarrier.init(q_ready.index(i), count=1)
    mbarrier.init(decays_ready.index(0), count=1)
    mbarrier.init(entry_ready.index(0), count=1)
    mbarrier.init(sum_ready.index(0), count=1)
    mbarrier.init(sum_empty.index(0), count=1)
    mbarrier.init(scores_empty.index(0), count=1)
    fence_async_shared()

    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, scores=scores)
    decays = Decays(cumsum=cumsum, chunk=chunk_decay, beta=beta_tile)
    barriers = Barriers(
        kv_ready=kv_ready,
        q_ready=q_ready,
        decays_ready=decays_ready,
        entry_ready=entry_ready,
        sum_ready=sum_ready,
        sum_empty=sum_empty,
        scores_empty=scores_empty,
    )
    gl.warp_specialize(
        [
            (mma_partition, (tiles, decays, barriers, o_desc, states_desc, H, scale)),
            (
                load_partition,
                (
                    tiles,
                    decays,
                    barriers,
                    Descriptors(q=q_desc, k=k_desc, v=v_desc, states=states_desc),
                    Pointers(g=g_ptr, beta=beta_ptr, start=start_ptr, end=end_ptr, states=states_ptr, decay=decay_ptr),
                    Sizes(T=T, H=H, qk_group=qk_group, v_group=v_group, g_t=g_t, beta_t=beta_t),
                    KEYS,
                    VALUES,
                ),
            ),
        ],
        [4],
        [72],
    )
