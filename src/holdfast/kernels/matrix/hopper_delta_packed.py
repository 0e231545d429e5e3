"""Packed sequences in the delta rule's kernels on Hopper: where they are, and tiles that two of them share.

Chunks count from each sequence's first token. Sequence n's are those from begin // 64 + n on, of T // 64 + N, so that
no two sequences' meet: in all that is kept of chunks they are whole. `aside` is how far a token lies from there, and
where its sequence ends in whole chunks; None where nothing is packed.

Segments of `span` chunks count likewise: sequence n's are those from begin // (64 span) + n on, of T // (64 span) + N.
A segment is a shorter sequence to the kernels; a place for one that no sequence has is one without chunks.
"""

from holdfast.kernels.common.gluon import barrier, fence_async_shared, gl, gluon, mbarrier

from .hopper_gates import CHUNK, of_head


@gluon.jit
def of_sequence(cu_ptr, n, T):
    """A packed sequence's first chunk, how far aside a token is, and where the sequence ends."""
    # offsets that are wrong must not lead out of the tensors
    begin = gl.minimum(gl.maximum(gl.load(cu_ptr + n), 0), T).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(cu_ptr + n + 1), 0), T).to(gl.int32)
    chunk = begin // CHUNK + n
    shift = begin - chunk * CHUNK
    return chunk, shift, gl.maximum(end, begin) - shift


@gluon.jit
def _owner(cu_ptr, place, tokens, sequences, T):
    """The last sequence whose chunks or segments, of so many tokens each, do not begin behind this one."""
    n = place * 0
    behind = n + sequences
    while behind - n > 1:
        middle = (n + behind) // 2
        first = gl.minimum(gl.maximum(gl.load(cu_ptr + middle), 0), T).to(gl.int32) // tokens + middle
        n = gl.where(first > place, n, middle)
        behind = gl.where(first > place, middle, behind)
    return n


@gluon.jit
def of_chunk(cu_ptr, chunk, sequences, T):
    """How far aside a chunk's tokens are, and where its sequence ends: before the chunk, if it is none's."""
    n = _owner(cu_ptr, chunk, CHUNK, sequences, T)
    _, shift, end = of_sequence(cu_ptr, n, T)
    return shift, end


@gluon.jit
def of_part(cu_ptr, place, span, sequences, T):
    """A segment as a sequence of its own, as of_sequence; then whose it is, which of its segments, of how many."""
    tokens = span * CHUNK
    n = _owner(cu_ptr, place, tokens, sequences, T)
    chunk, shift, end = of_sequence(cu_ptr, n, T)
    part = place - (chunk * CHUNK + shift) // tokens - n
    parts = gl.maximum(gl.cdiv(end - chunk * CHUNK, tokens), 1)
    # what is no sequence's segment is behind all chunks, where nothing is kept
    chunk = gl.where(part < parts, chunk + part * span, T // CHUNK + sequences)
    end = gl.maximum(gl.minimum(end, (chunk + span) * CHUNK), chunk * CHUNK)
    return chunk, shift, end, n, part, parts


@gluon.jit
def of_tokens(aside, H, b, t, h):
    """Where this block's head is at the first token of all chunks, from the strides."""
    if aside is None:
        return of_head(H, b, h)
    else:
        return aside[0].to(gl.int64) * t + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def place_of(aside, chunk, H):
    """A chunk's batch and first token."""
    if aside is None:
        return gl.program_id(0) // H, chunk * CHUNK
    else:
        return gl.program_id(0) * 0, chunk * CHUNK + aside[0]


@gluon.jit
def _clear_slowly(tile, rows):
    """clear_rows eight rows at a time: a warp that copies has few registers."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for start in gl.static_range(0, CHUNK, 8):
        if rows < start + 8:
            part = tile.reshape([CHUNK, width]).slice(start, 8)
            x = part.load(layout)
            part.store(gl.where((start + row < rows)[:, None], x, gl.zeros([8, width], x.dtype, layout)))


@gluon.jit
def clear_cut(tiles, rows, copied, loaded):
    """Of tiles that end in another sequence: waits for them, makes 0 of the others' rows, and hands them on.

    Weighed with 0, a NaN would stay one.
    """
    mbarrier.wait(copied, 0)
    count: gl.constexpr = len(tiles)
    for i in gl.static_range(count):
        _clear_slowly(tiles[i], rows)
    fence_async_shared()
    barrier()
    mbarrier.arrive(loaded, count=1)
