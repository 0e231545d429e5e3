"""The decay partition of backward.py: one warp, which in one with decay_grad took as long as a chunk's products."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import VECTORS, publish_decays
from holdfast.kernels.lib.gluon.decay_grad import load_log2_decay_beta
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait


@gluon.jit
def decay_partition(buffers, g_ptr, beta_ptr, beta_t, length, chunks, scale):
    """Publish each chunk's decays when its stage is empty, from the last chunk to the first."""
    STAGES: gl.constexpr = buffers.decays.shape[0] // VECTORS
    # the launch ahead leaves the log decays
    grid_dependency_wait()
    g, beta = load_log2_decay_beta(g_ptr, beta_ptr, beta_t, chunks.first + chunks.count - 1, chunks.count > 0, length)
    stage = 0
    phase = 1
    for i in range(chunks.count):
        g_next, beta_next = load_log2_decay_beta(
            g_ptr, beta_ptr, beta_t, chunks.first + chunks.count - 2 - i, i + 1 < chunks.count, length
        )
        mbarrier.wait(buffers.empty.index(stage), phase)
        publish_decays(buffers.decays, buffers.chunk_decay, buffers.decays_ready, stage, g, beta, scale, True)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
