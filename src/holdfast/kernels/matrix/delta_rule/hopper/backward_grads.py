"""The delta rule's gradients of q, k, v, g and beta in backward.py, one chunk after another, by four warps.

With S the state that enters a chunk, dS' the gradient of the one that leaves, U what the tokens wrote, and Yb, Y times
beta, nothing is left to be solved:
    F = scale causal(D * dO U^T);  E = - strictly lower(D * Yb U^T);
    dQ = scale exp(G) (dO S^T) + F K;  dK = (e U) dS'^T - exp(G) (Yb S^T) + F^T Q + (E + E^T) K;  dV = Yb.
See docs/delta-rule.md#gradient. The products with U come first and those with S last, so that the next chunk's are
loaded in time. dg's shares are left in shared memory, where backward_decay.py sums them.
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import chunk_coords
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail

from .backward_decay import BETA, BETA_EPS, DG_EARLIER, LOG_DECAY_CUMSUM, VECTORS
from .backward_loads import DS_TILE, S_TILE, STAGES, U_TILE, Y_TILE


class Values(NamedTuple):
    """Pointer to v and its strides, in units of 8."""

    ptr: Any
    b: Any
    t: Any
    h: Any


@gluon.jit
def _store(ptr, x, stride, rows, KEYS: gl.constexpr, layout: gl.constexpr):
    """Store a chunk's rows in float32, one every `stride` elements."""
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (column < KEYS)[None, :]
    gl.store(ptr + (row[:, None] * stride + column[None, :]), x, mask=inside)


@gluon.jit
def _rescale_small_beta_rows(y, v_ptr, rows, weights, is_small, VALUES: gl.constexpr, layout: gl.constexpr):
    """Multiply the rows of y by weights in place; return y . v of the rows with a small beta, from before."""
    total = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, layout))
    # 64 columns at a time: few registers are left
    for part in gl.static_range(y.shape[1] // 64):
        column = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))
        tile = y.slice(part * 64, 64, 1)
        x = tile.load(layout)
        inside = is_small[:, None] & (column < VALUES)[None, :]
        v = gl.load(v_ptr + (rows[:, None] + column[None, :]), mask=inside, other=0.0)
        total += gl.sum(x.to(gl.float32) * v.to(gl.float32), 1)
        tile.store((x.to(gl.float32) * weights[:, None]).to(x.dtype))
    return total


@gluon.jit
def grad_partition(tiles, scores, stages, grads, values, chunks, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """Find every chunk's gradients, from the last to the first, once its Y and dS' are there."""
    T, H, packed, origin = chunks.T, chunks.H, chunks.packed, chunks.origin
    ready, empty = stages.tile_ready, stages.tile_empty
    V: gl.constexpr = tiles.ds.shape[1]
    K: gl.constexpr = tiles.ds.shape[2]
    dtype: gl.constexpr = tiles.ds.dtype
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p_row: gl.constexpr = gl.SliceLayout(1, p_layout)
    k_row: gl.constexpr = gl.SliceLayout(1, k_layout)
    wide_row: gl.constexpr = gl.SliceLayout(1, wide)

    head = gl.program_id(0) % H
    stage = 0
    phase = 0
    parity = 0
    for i in range(chunks.count):
        chunk = chunks.first + chunks.count - 1 - i
        batch, token = chunk_coords(packed, chunk, H)
        row0 = chunk * CHUNK
        q = tiles.q.index(stage).reshape([CHUNK, K])
        k = tiles.k.index(stage).reshape([CHUNK, K])
        do = tiles.do.index(stage).reshape([CHUNK, V])
        cumsum = stages.decays.index(stage * VECTORS + LOG_DECAY_CUMSUM)
        zero = opaque(i ^ i)
        u = tiles.u.index(zero).reshape([CHUNK, V])
        y = tiles.y.index(zero).reshape([CHUNK, V])
        s = tiles.s.index(zero)
        ds = tiles.ds.index(zero)
        f_tile = scores.index(zero + 1)
        e_tile = scores.index(zero + 2)
        row = (zero + gl.arange(0, CHUNK, p_row))[:, None]
        column = opaque(gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout)))[None, :]
        mbarrier.wait(stages.stage_ready.index(stage), phase)
        mbarrier.wait(ready.index(U_TILE), parity)
        dp = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        dp = warpgroup_mma(do, u.permute((1, 0)), dp, use_acc=False, is_async=True)
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        betas = stages.decays.index(stage * VECTORS + BETA)
        beta = betas.load(p_row)
        # dV is Yb, but where a beta is small or rows are another sequence's
        is_rescaled = gl.sum(stages.small_betas.index(stage).load(one), 0) > 0
        if packed is not None:
            is_rescaled = is_rescaled | (packed.end - row0 < CHUNK)
        is_small = (beta <= BETA_EPS) & (beta >= -BETA_EPS)
        factor = gl.where(is_small, beta, 1.0)
        log = cumsum.load(p_row)[:, None] - cumsum.load(gl.SliceLayout(0, p_layout))[None, :]
        between = gl.exp2(gl.where(row >= column, log, float("-inf")))
        dp, qk = warpgroup_mma_wait(0, deps=(dp, qk))
        dp = dp * between * chunks.scale
        pairs = gl.where(row == column, 0.0, dp * qk)
        f_tile.store(dp.to(dtype))

        mbarrier.wait(ready.index(Y_TILE), parity)
        z = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        z = warpgroup_mma(y, u.permute((1, 0)), z, use_acc=False, is_async=True)
        kk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        kk = warpgroup_mma(k, k.permute((1, 0)), kk, use_acc=False, is_async=True)
        if is_rescaled == 0:
            tma_store(grads.dv_desc, [batch, token, head, 0], tiles.y.index(0))
        z, kk = warpgroup_mma_wait(0, deps=(z, kk))
        # Yb is Y itself where beta is small
        log = cumsum.load(p_row)[:, None] - cumsum.load(gl.SliceLayout(0, p_layout))[None, :]
        between = gl.exp2(gl.where(row > column, log, float("-inf")))
        own = gl.where(is_small, 0.0, 1.0 / gl.where(is_small, 1.0, beta * beta))
        dbeta = gl.sum(gl.where(row == column, z, 0.0), 1) * own
        z = z * between
        kk_pairs = z * kk
        e_tile.store((z * -factor[:, None]).to(dtype))
        dbeta -= gl.where(is_small, gl.sum(kk_pairs, 1), 0.0)
        pairs -= kk_pairs * factor[:, None]
        dg = gl.sum(pairs, 1)
        stages.decays.index(stage * VECTORS + DG_EARLIER).store(gl.sum(pairs, 0))
        fence_async_shared()
        barrier()

        mbarrier.wait(ready.index(S_TILE), parity)
        mbarrier.wait(ready.index(DS_TILE), parity)
        write = gl.zeros([CHUNK, K], gl.float32, k_layout)
        write = warpgroup_mma(u, ds, write, use_acc=False, is_async=True)
        dk = gl.zeros([CHUNK, K], gl.float32, k_layout)
        dk = warpgroup_mma(y, s, dk, use_acc=False, is_async=True)
        last = cumsum.slice(CHUNK - 1, 1).load(k_row)
        here = cumsum.load(k_row)
        to_end = gl.exp2(last - here)
        reads = gl.exp2(here)
        reads_beta = reads * gl.convert_layout(factor, k_row)
        write, dk = warpgroup_mma_wait(0, deps=(write, dk))
        write = write * to_end[:, None]
        key = k.load(k_layout).to(gl.float32)
        written = gl.sum(key * write, 1)
        k_dk = gl.sum(key * dk, 1)
        dk = dk * (-reads_beta)[:, None] + write
        # every warp has read U, Yb and dS', and dV's copy has left its tile
        tma_store_wait(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(U_TILE), count=1)
        mbarrier.arrive(empty.index(Y_TILE), count=1, pred=is_rescaled == 0)
        mbarrier.arrive(empty.index(DS_TILE), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        dq = gl.zeros([CHUNK, K], gl.float32, k_layout)
        dq = warpgroup_mma(do, s, dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(f_tile.permute((1, 0)), q, dk, is_async=True)
        dk = warpgroup_mma(e_tile, k, dk, is_async=True)
        dk = warpgroup_mma(e_tile.permute((1, 0)), k, dk, is_async=True)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
        q_dq = gl.sum(q.load(k_layout).to(gl.float32) * dq, 1)
        dq = dq * (reads * chunks.scale)[:, None]
        barrier()
        mbarrier.arrive(empty.index(S_TILE), count=1)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
        dq = warpgroup_mma(f_tile, k, dq, is_async=True)
        dg += gl.convert_layout(q_dq * (reads * chunks.scale) - k_dk * reads_beta, p_row)
        dbeta -= gl.where(is_small, gl.convert_layout(k_dk * reads, p_row), 0.0)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        # the warps that carry dS have read q and k, and so has every warp here
        mbarrier.wait(stages.dstate_ready.index(stage), phase)
        barrier()
        base = ((origin + row0) * H + head) * KEYS
        if grads.dq_desc is None:
            _store(grads.dq + base, dq, H * KEYS, T - row0, KEYS, k_layout)
            _store(grads.dk + base, dk, H * KEYS, T - row0, KEYS, k_layout)
        else:
            q.store(dq.to(dtype))
            k.store(dk.to(dtype))
        # here, where little else takes registers
        if is_rescaled:
            rows = gl.arange(0, CHUNK, wide_row)
            weights = betas.load(wide_row)
            rescaled = (weights <= BETA_EPS) & (weights >= -BETA_EPS)
            start = (batch.to(gl.int64) * values.b + token.to(gl.int64) * values.t + head.to(gl.int64) * values.h) * 8
            at = rows.to(gl.int64) * values.t * 8
            weights = gl.where(rescaled, weights, 1.0)
            found = _rescale_small_beta_rows(
                y, values.ptr + start, at, weights, rescaled & (row0 + rows < T), VALUES, wide
            )
            dbeta += gl.convert_layout(found, p_row)
            fence_async_shared()
            barrier()
            if packed is None or packed.end - row0 >= CHUNK:
                tma_store(grads.dv_desc, [batch, token, head, 0], tiles.y.index(0))
                tma_store_wait(0)
            else:
                heads = opaque(H)
                into = ((origin + row0) * H + head) * VALUES
                store_tail(tiles.y.index(0), grads.dv + into, heads * VALUES, T - row0, VALUES)
                if grads.dq_desc is not None:
                    store_tail(tiles.q.index(stage), grads.dq + base, heads * KEYS, T - row0, KEYS)
                    store_tail(tiles.k.index(stage), grads.dk + base, heads * KEYS, T - row0, KEYS)
            barrier()
        mbarrier.arrive(empty.index(Y_TILE), count=1, pred=is_rescaled)
        if grads.dbeta is not None:
            tokens = row0 + gl.arange(0, CHUNK, p_row)
            gl.store(grads.dbeta + (origin + tokens) * H + head, dbeta, mask=tokens < T)
        # dg's shares of writes, and of pairs and reads, where backward_decay.py takes them from
        cumsum.store(written)
        betas.store(dg)
        fence_async_shared()
        barrier()
        mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        parity ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
