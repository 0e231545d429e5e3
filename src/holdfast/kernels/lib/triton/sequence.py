"""Where a program's sequence, segment or chunk begins and ends."""

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(n, cu_seqlens, T, segment, SEGMENTS: tl.constexpr):
    """Return batch row, first token and end of the n-th sequence, or of the n-th segment of equal sequences."""
    if cu_seqlens is not None:
        batch = n * 0
        # wrong offsets must not reach outside of the tensors
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
    else:
        batch = n // SEGMENTS
        first = (n % SEGMENTS).to(tl.int64) * segment
        end = tl.minimum(first + segment, T)
    return batch, first, end


@triton.jit
def chunk_coords(program, cu_seqlens, T, sequences, low, window, CHUNK: tl.constexpr):
    """Return the sequence, its batch row, first token and end, and the chunk of the program-th place.

    Equal sequences have `window` places each, for the chunks from `low` on. Packed ones have a place a chunk and up to
    one more each, at or past their end.
    """
    if cu_seqlens is not None:
        # the last sequence whose first place is not past this one
        n = program * 0
        behind = sequences + n
        while behind - n > 1:
            middle = (n + behind) // 2
            offset = tl.load(cu_seqlens + middle)
            if offset // CHUNK + middle <= program:
                n = middle
            else:
                behind = middle
        batch = n * 0
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        chunk = program - (first // CHUNK).to(tl.int32) - n
    else:
        n = program // window
        batch = n
        first = n.to(tl.int64) * 0
        end = first + T
        chunk = low + program % window
    return n.to(tl.int64), batch.to(tl.int64), first, end, chunk
