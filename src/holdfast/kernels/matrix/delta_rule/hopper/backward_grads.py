"""The delta rule's gradients of q, k, v, g and beta in backward.py, a chunk after the other, by four warps.

With S the state that enters a chunk, dS' the gradient of the one that leaves, what the tokens wrote U, and Yb, Y times
beta, nothing is left to be solved:
    F = scale causal(D * dO U^T);  E = - strictly lower(D * Yb U^T);
    dQ = scale exp(G) (dO S^T) + F K;  dK = (e U) dS'^T - exp(G) (Yb S^T) + F^T Q + (E + E^T) K;  dV = Yb.
See docs/delta-rule.md. The products with U come first and those with S last, so that the next chunk's are on their way
in time.
"""

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

from .backward_decay import DS_TILE, EARLIER, S_TILE, STAGES, STRENGTH, TOTAL, U_TILE, VECTORS, WEAK, Y_TILE


@gluon.jit
def _store(ptr, x, stride, rows, KEYS: gl.constexpr, layout: gl.constexpr):
    """Writes a chunk's rows in float32, one every `stride` elements."""
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (column < KEYS)[None, :]
    gl.store(ptr + (row[:, None] * stride + column[None, :]), x, mask=inside)


@gluon.jit
def _mend(y, v_ptr, rows, weights, live, VALUES: gl.constexpr, layout: gl.constexpr):
    """Weighs the rows of y in place; what the product of those that are live and v's was before."""
    total = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, layout))
    # 64 columns at a time: little room is left in registers
    for part in gl.static_range(y.shape[1] // 64):
        column = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))
        tile = y.slice(part * 64, 64, 1)
        x = tile.load(layout)
        inside = live[:, None] & (column < VALUES)[None, :]
        v = gl.load(v_ptr + (rows[:, None] + column[None, :]), mask=inside, other=0.0)
        total += gl.sum(x.to(gl.float32) * v.to(gl.float32), 1)
        tile.store((x.to(gl.float32) * weights[:, None]).to(x.dtype))
    return total


@gluon.jit
def find_gradients(tiles, scores, places, results, values, numbers, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """Gradients of every chunk, from the last to the first, once Y and dS' are there."""
    q_tiles, k_tiles, do_tiles, _, u_tiles, s_tiles, y_tiles, ds_tiles = tiles
    gates, _, weak, loaded, gated, walked, free, full, empty = places
    dq_desc, _, dv_desc, dq_ptr, dk_ptr, dv_ptr, dbeta_ptr = results
    v_ptr, v_b, v_t, v_h = values
    T, H, chunk0, count, scale, aside, origin = numbers
    V: gl.constexpr = ds_tiles.shape[1]
    K: gl.constexpr = ds_tiles.shape[2]
    dtype: gl.constexpr = ds_tiles.dtype
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
    turn = 0
    for i in range(count):
        chunk = chunk0 + count - 1 - i
        batch, token = chunk_coords(aside, chunk, H)
        row0 = chunk * CHUNK
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        do = do_tiles.index(stage).reshape([CHUNK, V])
        total = gates.index(stage * VECTORS + TOTAL)
        zero = opaque(i ^ i)
        u = u_tiles.index(zero).reshape([CHUNK, V])
        y = y_tiles.index(zero).reshape([CHUNK, V])
        s = s_tiles.index(zero)
        ds = ds_tiles.index(zero)
        f_tile = scores.index(zero + 1)
        e_tile = scores.index(zero + 2)
        row = (zero + gl.arange(0, CHUNK, p_row))[:, None]
        column = opaque(gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout)))[None, :]
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.wait(full.index(U_TILE), turn)
        dp = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        dp = warpgroup_mma(do, u.permute((1, 0)), dp, use_acc=False, is_async=True)
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        mbarrier.wait(gated.index(stage), phase)
        strengths = gates.index(stage * VECTORS + STRENGTH)
        strength = strengths.load(p_row)
        # dV is Yb, but where beta is weak or rows are another sequence's
        is_mended = gl.sum(weak.index(stage).load(one), 0) > 0
        if aside is not None:
            is_mended = is_mended | (aside[1] - row0 < CHUNK)
        is_weak = (strength <= WEAK) & (strength >= -WEAK)
        factor = gl.where(is_weak, strength, 1.0)
        log = total.load(p_row)[:, None] - total.load(gl.SliceLayout(0, p_layout))[None, :]
        between = gl.exp2(gl.where(row >= column, log, float("-inf")))
        dp, qk = warpgroup_mma_wait(0, deps=(dp, qk))
        dp = dp * between * scale
        pairs = gl.where(row == column, 0.0, dp * qk)
        f_tile.store(dp.to(dtype))

        mbarrier.wait(full.index(Y_TILE), turn)
        z = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        z = warpgroup_mma(y, u.permute((1, 0)), z, use_acc=False, is_async=True)
        kk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        kk = warpgroup_mma(k, k.permute((1, 0)), kk, use_acc=False, is_async=True)
        if is_mended == 0:
            tma_store(dv_desc, [batch, token, head, 0], y_tiles.index(0))
        z, kk = warpgroup_mma_wait(0, deps=(z, kk))
        # Yb is Y itself where beta is weak
        log = total.load(p_row)[:, None] - total.load(gl.SliceLayout(0, p_layout))[None, :]
        between = gl.exp2(gl.where(row > column, log, float("-inf")))
        own = gl.where(is_weak, 0.0, 1.0 / gl.where(is_weak, 1.0, strength * strength))
        dbeta = gl.sum(gl.where(row == column, z, 0.0), 1) * own
        z = z * between
        seen = z * kk
        e_tile.store((z * -factor[:, None]).to(dtype))
        dbeta -= gl.where(is_weak, gl.sum(seen, 1), 0.0)
        pairs -= seen * factor[:, None]
        dg = gl.sum(pairs, 1)
        gates.index(stage * VECTORS + EARLIER).store(gl.sum(pairs, 0))
        fence_async_shared()
        barrier()

        mbarrier.wait(full.index(S_TILE), turn)
        mbarrier.wait(full.index(DS_TILE), turn)
        write = gl.zeros([CHUNK, K], gl.float32, k_layout)
        write = warpgroup_mma(u, ds, write, use_acc=False, is_async=True)
        dk = gl.zeros([CHUNK, K], gl.float32, k_layout)
        dk = warpgroup_mma(y, s, dk, use_acc=False, is_async=True)
        last = total.slice(CHUNK - 1, 1).load(k_row)
        here = total.load(k_row)
        to_end = gl.exp2(last - here)
        reads = gl.exp2(here)
        keep = reads * gl.convert_layout(factor, k_row)
        write, dk = warpgroup_mma_wait(0, deps=(write, dk))
        write = write * to_end[:, None]
        key = k.load(k_layout).to(gl.float32)
        written = gl.sum(key * write, 1)
        known = gl.sum(key * dk, 1)
        dk = dk * (-keep)[:, None] + write
        # every warp has read U, Yb and dS', and dV's copy has left its tile
        tma_store_wait(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(U_TILE), count=1)
        mbarrier.arrive(empty.index(Y_TILE), count=1, pred=is_mended == 0)
        mbarrier.arrive(empty.index(DS_TILE), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        dq = gl.zeros([CHUNK, K], gl.float32, k_layout)
        dq = warpgroup_mma(do, s, dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(f_tile.permute((1, 0)), q, dk, is_async=True)
        dk = warpgroup_mma(e_tile, k, dk, is_async=True)
        dk = warpgroup_mma(e_tile.permute((1, 0)), k, dk, is_async=True)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
        asked = gl.sum(q.load(k_layout).to(gl.float32) * dq, 1)
        dq = dq * (reads * scale)[:, None]
        barrier()
        mbarrier.arrive(empty.index(S_TILE), count=1)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
        dq = warpgroup_mma(f_tile, k, dq, is_async=True)
        dg += gl.convert_layout(asked * (reads * scale) - known * keep, p_row)
        dbeta -= gl.where(is_weak, gl.convert_layout(known * reads, p_row), 0.0)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        # the warps that walk have read q and k, and so has every warp here
        mbarrier.wait(walked.index(stage), phase)
        barrier()
        base = ((origin + row0) * H + head) * KEYS
        if dq_desc is None:
            _store(dq_ptr + base, dq, H * KEYS, T - row0, KEYS, k_layout)
            _store(dk_ptr + base, dk, H * KEYS, T - row0, KEYS, k_layout)
        else:
            q.store(dq.to(dtype))
            k.store(dk.to(dtype))
        # here, where little else takes registers
        if is_mended:
            rows = gl.arange(0, CHUNK, wide_row)
            weights = strengths.load(wide_row)
            live = (weights <= WEAK) & (weights >= -WEAK)
            start = (batch.to(gl.int64) * v_b + token.to(gl.int64) * v_t + head.to(gl.int64) * v_h) * 8
            at = rows.to(gl.int64) * v_t * 8
            weights = gl.where(live, weights, 1.0)
            found = _mend(y, v_ptr + start, at, weights, live & (row0 + rows < T), VALUES, wide)
            dbeta += gl.convert_layout(found, p_row)
            fence_async_shared()
            barrier()
            if aside is None or aside[1] - row0 >= CHUNK:
                tma_store(dv_desc, [batch, token, head, 0], y_tiles.index(0))
                tma_store_wait(0)
            else:
                heads = opaque(H)
                into = ((origin + row0) * H + head) * VALUES
                store_tail(y_tiles.index(0), dv_ptr + into, heads * VALUES, T - row0, VALUES)
                if dq_desc is not None:
                    store_tail(q_tiles.index(stage), dq_ptr + base, heads * KEYS, T - row0, KEYS)
                    store_tail(k_tiles.index(stage), dk_ptr + base, heads * KEYS, T - row0, KEYS)
            barrier()
        mbarrier.arrive(empty.index(Y_TILE), count=1, pred=is_mended)
        if dbeta_ptr is not None:
            tokens = row0 + gl.arange(0, CHUNK, p_row)
            gl.store(dbeta_ptr + (origin + tokens) * H + head, dbeta, mask=tokens < T)
        total.store(written)
        strengths.store(dg)
        fence_async_shared()
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        turn ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
