"""The gradient of mLSTM's gates with exponential gating, in two launches over the tiles of stabilizer.py.

The gradient dm of m behind a token becomes value + share * dm before it, share being what m_{t-1} has of m_t: 0 where
i_t was larger, 1 where log f_t + m_{t-1} was, a half where they were equal. A row of tokens does likewise. The first
launch transposes [B, H, T] and stores the maps of all tokens from each segment's first to its tile's last; the second
finds dm behind its tile from the tiles that follow and takes its tokens one after the other.

m is a unit: decays and betas measured in it have no gradient of it (MatrixCall). So dm is that of eps and of the last m
alone, no sum has terms that cancel, and float32 will do. That of the first m is the gradient of log f_1 + m_0, in which
alone it is found: <S, dS> of the first state is dg_1, of which what cancels has been left out.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .stabilizer import map_offsets, program_tile, sequence_of

# -0.0, bit for bit
_MINUS_ZERO = tl.constexpr(-(2**31))


class ReversedTile(NamedTuple):
    """Batch, segments [SEGMENTS, 1] with a tile's last first, their first tokens, and heads [1, HEADS] of a program."""

    batch: tl.tensor
    segment: tl.tensor
    token: tl.tensor
    head: tl.tensor


class End(NamedTuple):
    """Tokens' sequences, whether they end them, and dm behind those that do."""

    sequence: tl.tensor
    last: tl.tensor
    dm: tl.tensor


@triton.jit
def _and_later(share, value, later_share, later_value):
    """Apply tokens' maps to what later ones' maps give."""
    return share * later_share, value + share * later_value


@triton.jit
def _and_later_or_not(share, value, later_share, later_value):
    """Do what _and_later does, for packed sequences: not even a NaN passes a sequence's end."""
    return share * later_share, tl.where(share == 0.0, value, value + share * later_value)


@triton.jit
def _and_earlier(share, value, earlier_share, earlier_value):
    return _and_later(earlier_share, earlier_value, share, value)


@triton.jit
def _and_earlier_or_not(share, value, earlier_share, earlier_value):
    return _and_later_or_not(earlier_share, earlier_value, share, value)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _reversed_tile(TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr):
    """Return this program's ReversedTile: a scan in that order runs forward, which takes fewer shuffles."""
    tile = program_tile(TOKENS, SEGMENTS, HEADS)
    segment = tl.program_id(0) * (2 * SEGMENTS) + SEGMENTS - 1 - tile.segment
    return ReversedTile(batch=tile.batch, segment=segment, token=segment * TOKENS, head=tile.head)


@triton.jit
def _end(token, head, T, H, batch, dlast_ptr, cu_seqlens, sequences):
    """Return the tokens' End."""
    n = batch
    last = token + 1 == T
    if cu_seqlens is not None:
        n = sequence_of(token, cu_seqlens, sequences)
        last = token + 1 == tl.load(cu_seqlens + n + 1)
    dm = tl.zeros([1, 1], tl.float32)
    if dlast_ptr is not None:
        dm = tl.load(dlast_ptr + n * H + head, mask=last & (head < H), other=0.0)
    return End(sequence=n, last=last, dm=dm)


@triton.jit(do_not_specialize=["sequences"])
def mlstm_stabilizer_bwd_maps(
    cu_seqlens, g_ptr, beta_ptr, dg_ptr, dbeta_ptr, dm_ptr, dlast_ptr, dentry_ptr,
    share_ptr, value_ptr, of_i_ptr, of_f_ptr, map_ptr, T, H, sequences,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of T, blocks of H, B).

    g, beta, dg, dbeta, dm [B, H, T] float32, contiguous; dm may be None
    dlast, dentry [sequences, H] or None: gradients of m after and before; dentry is written where a sequence is empty
    share bfloat16, value, of_i, of_f float32 [B, T, H], contiguous, written: di is of_i + (1 - share) dm, and dlog f is
        of_f + value + share dm
    map [2, B, segments, H] float32, written
    The rest: as in mlstm_stabilizer_maps.
    """
    if PDL:
        gdc_launch_dependents()
    batch, segment, first, head = _reversed_tile(TOKENS, SEGMENTS, HEADS)
    step = tl.arange(0, TOKENS)[None, None, :]
    token = first[:, :, None] + step
    heads = head[:, :, None]
    live = (token < T) & (heads < H)
    at = (batch * H + heads) * T + token
    g = tl.load(g_ptr + at, mask=live, other=0.0)
    beta = tl.load(beta_ptr + at, mask=live, other=0.0)
    dg = tl.load(dg_ptr + at, mask=live, other=0.0)
    dbeta = tl.load(dbeta_ptr + at, mask=live, other=0.0) * beta
    dm = tl.zeros_like(dg)
    if dm_ptr is not None:
        dm = tl.load(dm_ptr + at, mask=live, other=0.0)
    share = tl.where(g < 0.0, 0.0, tl.where(g.to(tl.int32, bitcast=True) == _MINUS_ZERO, 0.5, 1.0))
    value = share * dm
    transposed = (batch * T + token) * H + heads
    tl.store(share_ptr + transposed, share.to(tl.bfloat16), mask=live)
    tl.store(value_ptr + transposed, value, mask=live)
    tl.store(of_i_ptr + transposed, dbeta + (1.0 - share) * dm, mask=live)
    tl.store(of_f_ptr + transposed, dg, mask=live)
    end = _end(token, heads, T, H, batch, dlast_ptr, cu_seqlens, sequences)
    value = tl.where(end.last, value + share * end.dm, value)
    share = tl.where(end.last, 0.0, share)
    if cu_seqlens is not None:
        share, value = tl.associative_scan((share, value), 2, _and_later_or_not)
    else:
        share, value = tl.associative_scan((share, value), 2, _and_later)
    all = step == TOKENS - 1
    share, value = tl.reduce((tl.where(all, share, 0.0), tl.where(all, value, 0.0)), 2, _both)
    if cu_seqlens is not None:
        share, value = tl.associative_scan((share, value), 0, _and_earlier_or_not)
    else:
        share, value = tl.associative_scan((share, value), 0, _and_earlier)
    at, apart = map_offsets(batch, segment, head, H, SEGMENTS)
    tl.store(map_ptr + at, share, mask=head < H)
    tl.store(map_ptr + at + apart, value, mask=head < H)
    if cu_seqlens is not None and dentry_ptr is not None:
        # the next launch has those of sequences with tokens
        for n in range(tl.program_id(0), sequences, tl.num_programs(0)):
            m = tl.zeros([1, HEADS], tl.float32)
            if dlast_ptr is not None:
                m = tl.load(dlast_ptr + n * H + head, mask=head < H, other=0.0)
            tl.store(dentry_ptr + n * H + head, m, mask=head < H)


@triton.jit
def _behind_tile(map_ptr, batch, head, tiles, H, SEGMENTS: tl.constexpr, TILES: tl.constexpr):
    """Return dm [HEADS] behind this program's tile, from the maps of the tiles that follow, before `tiles`.

    The sequence of this program's last token ends in the last of them.
    """
    dm = tl.zeros(head.shape, tl.float32)
    # share of dm that is left where a block of tiles begins
    left = tl.full(head.shape, 1.0, tl.float32)
    for start in range(tl.program_id(0) + 1, tiles, TILES):
        tile = (start + tl.arange(0, TILES))[None, :]
        live = (tile < tiles) & (head < H)[:, None]
        at, apart = map_offsets(batch, tile.to(tl.int64) * SEGMENTS, head[:, None], H, SEGMENTS)
        share = tl.load(map_ptr + at, mask=live, other=1.0)
        value = tl.load(map_ptr + at + apart, mask=live, other=0.0)
        share, value = tl.associative_scan((share, value), 1, _and_later)
        all = (tl.arange(0, TILES) == TILES - 1)[None, :]
        share, value = tl.reduce((tl.where(all, share, 0.0), tl.where(all, value, 0.0)), 1, _both)
        dm += left * value
        left *= share
    return dm


@triton.jit(do_not_specialize=["sequences"])
def mlstm_stabilizer_bwd(
    f_ptr, share_ptr, value_ptr, of_i_ptr, of_f_ptr, cu_seqlens, dlast_ptr, di_ptr, df_ptr, dentry_ptr, map_ptr,
    T, H, sequences, f_batch, f_step, f_head,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid and the other arguments: as mlstm_stabilizer_bwd_maps has them, whose results this reads.

    f [B, T, H], strides
    di, df [B, T, H], contiguous, written
    dentry [sequences, H] or None, written where a sequence has tokens
    """
    batch, segment, token, head = program_tile(TOKENS, SEGMENTS, HEADS)
    f_at = f_ptr + batch * f_batch + token * f_step + head * f_head
    f = ()
    for t in tl.static_range(TOKENS):
        f += (tl.load(f_at + t * f_step, mask=(token + t < T) & (head < H), other=0.0),)
    if PDL:
        gdc_wait()
    at = (batch * T + token) * H + head
    shares, values, of_i, of_f = (), (), (), ()
    for t in tl.static_range(TOKENS):
        live = (token + t < T) & (head < H)
        shares += (tl.load(share_ptr + at + t * H, mask=live, other=1.0),)
        values += (tl.load(value_ptr + at + t * H, mask=live, other=0.0),)
        of_i += (tl.load(of_i_ptr + at + t * H, mask=live, other=0.0),)
        of_f += (tl.load(of_f_ptr + at + t * H, mask=live, other=0.0),)
    tiles = tl.num_programs(0)
    if cu_seqlens is not None:
        behind = (tl.program_id(0) + 1).to(tl.int64) * TOKENS * SEGMENTS
        n = sequence_of(tl.minimum(behind, T) - 1, cu_seqlens, sequences)
        # wrong offsets must not reach outside of the maps
        tiles = tl.cdiv(tl.minimum(tl.load(cu_seqlens + n + 1), T), TOKENS * SEGMENTS).to(tl.int32)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    dm = _behind_tile(map_ptr, batch, heads, tiles, H, SEGMENTS, TILES)[None, :]
    inner = (segment % SEGMENTS < SEGMENTS - 1) & (head < H)
    map_at, apart = map_offsets(batch, segment + 1, head, H, SEGMENTS)
    share = tl.load(map_ptr + map_at, mask=inner, other=1.0)
    value = tl.load(map_ptr + map_at + apart, mask=inner, other=0.0)
    dm = tl.where(share == 0.0, value, value + share * dm)
    for t in tl.static_range(TOKENS - 1, -1, -1):
        live = (token + t < T) & (head < H)
        share = shares[t].to(tl.float32)
        n, last, dlast = _end(token + t, head, T, H, batch, dlast_ptr, cu_seqlens, sequences)
        dm = tl.where(last, dlast, dm)
        tl.store(di_ptr + at + t * H, (of_i[t] + (1.0 - share) * dm).to(di_ptr.dtype.element_ty), mask=live)
        dm = values[t] + share * dm
        df = (of_f[t] + dm) / (1.0 + tl.exp(f[t].to(tl.float32)))
        tl.store(df_ptr + at + t * H, df.to(df_ptr.dtype.element_ty), mask=live)
        if dentry_ptr is not None and (t == 0 or cu_seqlens is not None):
            first = token + t == 0
            if cu_seqlens is not None:
                first = token + t == tl.load(cu_seqlens + n)
            # the first m is one more log decay of the first token
            tl.store(dentry_ptr + n * H + head + token * 0, of_f[t] + dm, mask=first & live)
