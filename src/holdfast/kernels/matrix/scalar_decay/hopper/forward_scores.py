"""The score partition of forward.py: how much of each earlier token's value a chunk's outputs take.

    P^T * causal decay, where P^T = K Q^T.

That needs no state. In the mma partition, whose products wait for one another, a chunk's 4096 exponentials were time in
which nothing was multiplied.
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
def score_partition(tiles, stages, scores, left, count, scale, WEIGHTED: gl.constexpr, CUT: gl.constexpr):
    """Leave the scores of every chunk, rounded, in two tiles by turns.

    left: tokens from the first chunk on. CUT: whether what the last chunk has beyond them is another sequence's.
    """
    STAGES: gl.constexpr = tiles.q.shape[0]
    K: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.q.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        if CUT:  # noqa: SIM102 - known while compiling
            if left < CHUNK:
                zero_tail_rows(tiles.k.index(stage), left)
                zero_tail_rows(tiles.v.index(stage), left)
                fence_async_shared()
                barrier()
        p = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
        p = warpgroup_mma(
            tiles.k.index(stage).reshape([CHUNK, K]),
            tiles.q.index(stage).reshape([CHUNK, K]).permute((1, 0)),
            p,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        weight = causal_decay(stages.decays, stage, layout, False)
        if WEIGHTED:
            weight *= stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, layout))[:, None]
        else:
            weight *= scale
        p = warpgroup_mma_wait(0, deps=(p,))
        mbarrier.wait(scores.empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        scores.tiles.index(i & 1).store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(scores.ready.index(i & 1), count=1)
        mbarrier.arrive(stages.empty.index(stage), count=1)
        left -= CHUNK
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
