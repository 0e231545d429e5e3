"""Where chunks and their states are: a program that takes one chunk finds it by its slot."""

import triton
import triton.language as tl

from .decay import CHUNK

PIECE = tl.constexpr(64)
# columns that a program of gradients has
FOLDED_PIECE = tl.constexpr(32)


@triton.jit
def first_slot(n, first):
    """Return the slot of the first chunk of the n-th packed sequence, which starts at token `first`.

    Each sequence has slots of its own.
    """
    return first // CHUNK + n


@triton.jit
def sequence_bounds(n, cu_seqlens, T):
    """Return batch row, first token, end and first slot of the n-th sequence."""
    if cu_seqlens is None:
        batch = n
        first, end = n * 0, n * 0 + T
        slot = n * tl.cdiv(T, CHUNK)
    else:
        batch = n * 0
        # wrong offsets must not reach outside of the tensors
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        slot = first_slot(n, first)
    return batch, first, end, slot


@triton.jit
def chunk_bounds(slot, cu_seqlens, sequences, T):
    """Return batch row, first token and number of tokens of the chunk in a slot; 0 in one between packed sequences."""
    if cu_seqlens is None:
        chunks = tl.cdiv(T, CHUNK)
        batch = slot // chunks
        start = (slot % chunks).to(tl.int64) * CHUNK
        end = start * 0 + T
    else:
        batch = slot * 0
        n = slot * 0 - 1
        # the last sequence whose first slot is not past this one
        for group in tl.range(0, sequences, 128):
            number = group + tl.arange(0, 128)
            inside = number < sequences
            begins = tl.load(cu_seqlens + number, mask=inside, other=0).to(tl.int64)
            n += tl.sum((inside & (first_slot(number, begins) <= slot)).to(tl.int32), 0)
        # wrong offsets must not reach outside of the tensors
        n = tl.maximum(n, 0)
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        start = begin + (slot - first_slot(n, begin)) * CHUNK
    count = tl.minimum(tl.maximum(end - start, 0), CHUNK).to(tl.int32)
    return batch.to(tl.int64), start, count


@triton.jit
def state_offsets(values, columns, slot, head, H: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets [values, columns] of a chunk's state in [slots, H, COLUMNS, WIDTH]."""
    return (slot * H + head) * WIDTH * COLUMNS + (values * WIDTH)[:, None] + columns[None, :]


@triton.jit
def folded_state_offsets(values, columns, token, H: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets [values, columns] of a chunk's state in memory of numbers twice as large, [B, T, H, WIDTH].

    There may be up to 2 CHUNK values. FOLDED_PIECE columns of two values lie where as many columns of one token do, so
    that the program of a piece finds them where it later writes. token: the chunk's first one of the head.
    """
    value = (token + values // 2 * H) * (2 * WIDTH) + values % 2 * FOLDED_PIECE
    return value[:, None] + (columns // FOLDED_PIECE * (2 * FOLDED_PIECE) + columns % FOLDED_PIECE)[None, :]


@triton.jit
def tile_offsets(
    values, columns, slot, head, H: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILED: tl.constexpr
):
    """Do `state_offsets`; TILED: in [slots, 64, H, K / 64, V / 64, 64], whose rows hold one of each 64 values, as
    vector_decay/hopper reads them."""
    if TILED:
        V_TILES: tl.constexpr = (COLUMNS + PIECE - 1) // PIECE
        K_TILES: tl.constexpr = (WIDTH + PIECE - 1) // PIECE
        row = ((slot * PIECE + values % PIECE) * H + head) * (K_TILES * V_TILES * PIECE) + values // PIECE * PIECE
        at = row[:, None] + (columns // PIECE * (V_TILES * PIECE) + columns % PIECE)[None, :]
    else:
        at = state_offsets(values, columns, slot, head, H, WIDTH, COLUMNS)
    return at
