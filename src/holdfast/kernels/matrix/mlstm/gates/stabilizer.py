"""mLSTM's gates with exponential gating, in two launches over tiles of tokens and heads.

m_t = max(log f_t + m_{t-1}, i_t): a token, and so a row of tokens, maps m to max(m + fall, least), in float64. A thread
has a segment of one head's tokens, which it takes one after the other; SEGMENTS of them and HEADS heads make a tile.
The first launch stores the maps of all tokens from a tile's first to each segment's last; the second finds m before its
tile from the tiles ahead of it and takes its tokens again. From a sequence's first token on fall is -inf: what was
before does not matter.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid

_NEVER = tl.constexpr(float("-inf"))
# a smaller log f forgets all the same, and sums of such numbers still tell the others apart
_LEAST = tl.constexpr(-1e6)


class Strides(NamedTuple):
    """Of a tensor [B, T, H]."""

    batch: tl.tensor
    step: tl.tensor
    head: tl.tensor


class Tile(NamedTuple):
    """Batch, segments [SEGMENTS, 1], their first tokens and heads [1, HEADS] of a program."""

    batch: tl.tensor
    segment: tl.tensor
    token: tl.tensor
    head: tl.tensor


class Start(NamedTuple):
    """Tokens' sequences, whether they begin them, and m before those that do."""

    sequence: tl.tensor
    first: tl.tensor
    m: tl.tensor


class Places(NamedTuple):
    """Batch, first tokens and heads of a tile's segments."""

    batch: tl.tensor
    token: tl.tensor
    head: tl.tensor


@triton.jit
def larger(a, b):
    # no maximum, which would look for a NaN, at eight instructions; of a NaN and a number b is the NaN
    return tl.where(a > b, a, b)


@triton.jit
def _then(fall, least, next_fall, next_least):
    return fall + next_fall, larger(next_least, least + next_fall)


@triton.jit
def _then_or_anew(fall, least, next_fall, next_least):
    """Do what _then does, for packed sequences: not even a NaN passes a sequence's start."""
    anew = next_fall == _NEVER
    return tl.where(anew, _NEVER, fall + next_fall), larger(next_least, tl.where(anew, _NEVER, least + next_fall))


@triton.jit
def _sum_and_largest(total, most, next_total, next_most):
    return total + next_total, larger(most, next_most)


@triton.jit
def sequence_of(token, cu_seqlens, sequences):
    """Find the last of the sequences that begin at token or before, by halving.

    sequences: no constant 1, with which the loop does not compile.
    """
    n = token * 0
    count = n + sequences
    most = sequences
    while most > 1:
        half = count // 2
        begun = tl.load(cu_seqlens + n + half).to(tl.int64) <= token
        n = tl.where(begun, n + half, n)
        count = tl.where(begun, count - half, half)
        most -= most // 2
    return n


@triton.jit
def program_tile(TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr):
    """Return this program's Tile."""
    segment = (tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]).to(tl.int64)
    return Tile(batch=tl.program_id(2).to(tl.int64), segment=segment, token=segment * TOKENS, head=head)


@triton.jit
def map_offsets(batch, segment, head, H, SEGMENTS: tl.constexpr):
    """Return where maps [2, B, segments, H] have a segment's first number, and the distance to the second."""
    segments = tl.num_programs(0).to(tl.int64) * SEGMENTS
    return (batch * segments + segment) * H + head, tl.num_programs(2) * segments * H


@triton.jit
def _load_gates(i_ptr, f_ptr, places, T, H, i_strides, f_strides, TOKENS: tl.constexpr):
    """Load i and log f of segments, a tensor [SEGMENTS, HEADS] for each token; -inf and 0 past the end."""
    batch, token, head = places
    i_at = i_ptr + batch * i_strides.batch + token * i_strides.step + head * i_strides.head
    f_at = f_ptr + batch * f_strides.batch + token * f_strides.step + head * f_strides.head
    i, f = (), ()
    for t in tl.static_range(TOKENS):
        live = (token + t < T) & (head < H)
        i += (tl.load(i_at + t * i_strides.step, mask=live, other=float("-inf")),)
        f += (tl.load(f_at + t * f_strides.step, mask=live, other=float("inf")),)
    log_f = ()
    for t in tl.static_range(TOKENS):
        x = log_sigmoid(f[t].to(tl.float32))
        # a maximum would hide a NaN
        log_f += (tl.where(x < _LEAST, _LEAST, x),)
    return i, log_f


@triton.jit
def _start(token, head, H, batch, entry_ptr, cu_seqlens, sequences):
    """Return the tokens' Start."""
    n = batch
    first = token == 0
    if cu_seqlens is not None:
        n = sequence_of(token, cu_seqlens, sequences)
        first = token == tl.load(cu_seqlens + n)
    entry = tl.zeros([1, 1], tl.float64)
    if entry_ptr is not None:
        entry = tl.load(entry_ptr + n * H + head, mask=first & (head < H), other=0.0).to(tl.float64)
    return Start(sequence=n, first=first, m=entry)


@triton.jit(do_not_specialize=["sequences"])
def mlstm_stabilizer_maps(
    i_ptr, f_ptr, entry_ptr, cu_seqlens, last_ptr, map_ptr, T, H, sequences,
    i_batch, i_step, i_head, f_batch, f_step, f_head,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of T, blocks of H, B).

    i, f [B, T, H], strides
    entry [sequences, H]: m before each sequence; None for 0
    last [sequences, H]: m after; written where a sequence is empty
    map [2, B, segments, H] float64, written: from the tile's first token to the segment's last
    cu_seqlens [sequences + 1] or None: offsets of packed sequences
    PDL: whether the next launch may start before this one has ended
    """
    if PDL:
        gdc_launch_dependents()
    batch, segment, token, head = program_tile(TOKENS, SEGMENTS, HEADS)
    i, log_f = _load_gates(
        i_ptr, f_ptr, Places(batch=batch, token=token, head=head), T, H,
        Strides(batch=i_batch, step=i_step, head=i_head), Strides(batch=f_batch, step=f_step, head=f_head), TOKENS,
    )  # fmt: skip
    fall = tl.zeros([SEGMENTS, HEADS], tl.float64)
    least = tl.full([SEGMENTS, HEADS], float("-inf"), tl.float64)
    for t in tl.static_range(TOKENS):
        here, down = i[t].to(tl.float64), log_f[t].to(tl.float64)
        fall += down
        least = larger(here, least + down)
        if t == 0 or cu_seqlens is not None:
            start = _start(token + t, head, H, batch, entry_ptr, cu_seqlens, sequences)
            fall = tl.where(start.first, _NEVER, fall)
            least = tl.where(start.first, larger(here, start.m + down), least)
    if cu_seqlens is not None:
        fall, least = tl.associative_scan((fall, least), 0, _then_or_anew)
    else:
        fall, least = tl.associative_scan((fall, least), 0, _then)
    at, apart = map_offsets(batch, segment, head, H, SEGMENTS)
    tl.store(map_ptr + at, fall, mask=head < H)
    tl.store(map_ptr + at + apart, least, mask=head < H)
    if cu_seqlens is not None:
        # the next launch has those of sequences with tokens
        for n in range(tl.program_id(0), sequences, tl.num_programs(0)):
            m = tl.zeros([1, HEADS], tl.float32)
            if entry_ptr is not None:
                m = tl.load(entry_ptr + n * H + head, mask=head < H, other=0.0).to(tl.float32)
            tl.store(last_ptr + n * H + head, m, mask=head < H)


@triton.jit
def _before_tile(map_ptr, batch, head, tile, H, SEGMENTS: tl.constexpr, TILES: tl.constexpr):
    """Return m [HEADS] before this program's tile, from the maps of the tiles ahead, from `tile` on.

    tile: where the sequence of this program's first token begins.
    """
    m = tl.full(head.shape, float("-inf"), tl.float64)
    # the sum over the tiles between, the nearest first
    fallen = tl.zeros(head.shape, tl.float64)
    for start in range(tile, tl.program_id(0), TILES):
        earlier = tl.program_id(0) - 1 - (start - tile) - tl.arange(0, TILES)[None, :]
        live = (earlier >= tile) & (head < H)[:, None]
        at, apart = map_offsets(batch, earlier.to(tl.int64) * SEGMENTS + SEGMENTS - 1, head[:, None], H, SEGMENTS)
        fall = tl.load(map_ptr + at, mask=live, other=0.0)
        least = tl.load(map_ptr + at + apart, mask=live, other=float("-inf"))
        # no tile is ahead of the last of them
        fall = tl.where(fall == _NEVER, 0.0, fall)
        total, most = tl.reduce((fall, least + (tl.cumsum(fall, 1) - fall)), 1, _sum_and_largest)
        m = larger(most + fallen, m)
        fallen += total
    # a NaN is in the sum
    return tl.where(fallen == fallen, m, fallen)


@triton.jit
def _nested(x):
    if len(x) == 1:
        return x[0]
    else:
        return tl.join(_nested(x[0 : len(x) : 2]), _nested(x[1 : len(x) : 2]))


@triton.jit
def _side_by_side(x):
    """Join tensors [a, b], whose number is a power of two, into one [a, b, number]."""
    y = _nested(x)
    return y.reshape(y.shape[0], y.shape[1], len(x))


@triton.jit(do_not_specialize=["sequences"])
def mlstm_stabilizer(
    i_ptr, f_ptr, entry_ptr, cu_seqlens, g_ptr, beta_ptr, m_ptr, last_ptr, map_ptr, T, H, sequences,
    i_batch, i_step, i_head, f_batch, f_step, f_head,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid and the other arguments: as mlstm_stabilizer_maps has them, whose maps this reads.

    g, beta, m [B, H, T] float32, contiguous, written. g is -0.0 where both arguments of the maximum are equal, and 0.0
        where log f_t + m_{t-1} is larger
    last [sequences, H], written: m after each sequence that has tokens
    """
    batch, segment, token, head = program_tile(TOKENS, SEGMENTS, HEADS)
    i, log_f = _load_gates(
        i_ptr, f_ptr, Places(batch=batch, token=token, head=head), T, H,
        Strides(batch=i_batch, step=i_step, head=i_head), Strides(batch=f_batch, step=f_step, head=f_head), TOKENS,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    tile = 0
    if cu_seqlens is not None:
        n = sequence_of(tl.program_id(0).to(tl.int64) * TOKENS * SEGMENTS, cu_seqlens, sequences)
        # wrong offsets must not reach outside of the maps
        tile = (tl.maximum(tl.load(cu_seqlens + n), 0) // (TOKENS * SEGMENTS)).to(tl.int32)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    m = _before_tile(map_ptr, batch, heads, tile, H, SEGMENTS, TILES)[None, :]
    inner = (segment % SEGMENTS > 0) & (head < H)
    at, apart = map_offsets(batch, segment - 1, head, H, SEGMENTS)
    fall = tl.load(map_ptr + at, mask=inner, other=0.0)
    least = tl.load(map_ptr + at + apart, mask=inner, other=float("-inf"))
    m = larger(least, tl.where(fall == _NEVER, _NEVER, m + fall))
    gains, values = (), ()
    for t in tl.static_range(TOKENS):
        here, down = i[t].to(tl.float64), log_f[t].to(tl.float64)
        n = batch
        if t == 0 or cu_seqlens is not None:
            n, first, entry = _start(token + t, head, H, batch, entry_ptr, cu_seqlens, sequences)
            m = tl.where(first, entry, m)
        m += down
        # no difference of numbers that are not equal is 0 in float32
        gain = (here - m).to(tl.float32)
        m = tl.where(gain > 0.0, here, m)
        gains += (gain,)
        values += (m.to(tl.float32),)
        if cu_seqlens is not None:
            is_last = (token + t + 1 == tl.load(cu_seqlens + n + 1)) & (head < H)
            tl.store(last_ptr + n * H + head, m.to(tl.float32), mask=is_last)
    if cu_seqlens is None:
        is_last = (segment == (T - 1) // TOKENS) & (head < H)
        tl.store(last_ptr + batch * H + head + segment * 0, m.to(tl.float32), mask=is_last)
    gain = _side_by_side(gains)
    token = token[:, :, None] + tl.arange(0, TOKENS)[None, None, :]
    head = head[:, :, None]
    live = (token < T) & (head < H)
    at = (batch * H + head) * T + token
    # a NaN is in all of them; no sign by subtraction, which has no -0.0
    tl.store(g_ptr + at, tl.where(gain < 0.0, 0.0, gain * -1.0), mask=live)
    tl.store(beta_ptr + at, tl.exp(tl.where(gain > 0.0, 0.0, gain)), mask=live)
    tl.store(m_ptr + at, _side_by_side(values), mask=live)
