"""The warps of forward.py that score: how much of each earlier token's value a chunk's outputs take.

    P^T * within, where P^T = K Q^T.

That needs no state. Among the products of the warps that multiply, which wait for one another, a chunk's 4096
exponentials were time in which nothing was multiplied.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, VECTORS, causal_decay
from holdfast.kernels.lib.gluon.tails import zero_tail_rows


@gluon.jit
def score(
    tiles,
    places,
    of_scores,
    left,
    count,
    scale,
    WEIGHTED: gl.constexpr,
    CUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Scores of every chunk, rounded, in two tiles by turns.

    left: tokens from the first chunk on. CUT: whether what the last chunk has beyond them is another sequence's.
    """
    q_tiles, k_tiles, v_tiles, _ = tiles
    gates, _, _, loaded, gated, free = places
    p_tiles, scored, spent = of_scores
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        if CUT:  # noqa: SIM102 - known while compiling
            if left < CHUNK:
                zero_tail_rows(k_tiles.index(stage), left)
                zero_tail_rows(v_tiles.index(stage), left)
                fence_async_shared()
                barrier()
        p = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
        p = warpgroup_mma(
            k_tiles.index(stage).reshape([CHUNK, K]),
            q_tiles.index(stage).reshape([CHUNK, K]).permute((1, 0)),
            p,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(gated.index(stage), phase)
        weight = causal_decay(gates, stage, layout, False)
        if WEIGHTED:
            weight *= gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, layout))[:, None]
        else:
            weight *= scale
        p = warpgroup_mma_wait(0, deps=(p,))
        mbarrier.wait(spent.index(i & 1), ((i >> 1) & 1) ^ 1)
        p_tiles.index(i & 1).store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(scored.index(i & 1), count=1)
        mbarrier.arrive(free.index(stage), count=1)
        left -= CHUNK
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
