"""Where sequences, chunks and segments begin and end: offsets of heads, tokens and packed sequences.

Packed sequences share no chunk. Sequence n has chunks from first // CHUNK + n on: chunk c begins at token
CHUNK * c + shift, and end - CHUNK * c tokens are left there.
"""

from typing import NamedTuple

from .compat import gl, gluon
from .decay import CHUNK


class Tokens(NamedTuple):
    """A block's sequence: its batch row, its first token there and how many it has."""

    batch: gl.tensor
    first: gl.tensor
    length: gl.tensor


class PackedBounds(NamedTuple):
    """What takes a packed sequence's chunks to its tokens, and where it ends."""

    shift: gl.tensor
    end: gl.tensor


class PackedSequence(NamedTuple):
    """A packed sequence's first chunk and its bounds."""

    chunk0: gl.tensor
    shift: gl.tensor
    end: gl.tensor


class PackedSegment(NamedTuple):
    """A segment as a sequence of its own; then the sequence it is of, its place among that one's, and their number."""

    chunk0: gl.tensor
    shift: gl.tensor
    end: gl.tensor
    sequence: gl.tensor
    segment: gl.tensor
    segments: gl.tensor


@gluon.jit
def head_offset(H, b, h):
    """Return the offset of this block's batch and head, from their strides."""
    return (gl.program_id(0) // H).to(gl.int64) * b + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def sequence_bounds(cu_ptr, T, H):
    """Return this block's Tokens: a batch's T, or those of a packed sequence."""
    if cu_ptr is None:
        return Tokens(batch=gl.program_id(0) // H, first=T * 0, length=T)
    else:
        bounds = cu_ptr + gl.program_id(0) // H
        # offsets that are wrong must not lead out of the tensors
        begin = gl.minimum(gl.maximum(gl.load(bounds), 0), T).to(gl.int32)
        end = gl.minimum(gl.maximum(gl.load(bounds + 1), 0), T).to(gl.int32)
        return Tokens(batch=gl.program_id(0) * 0, first=begin, length=gl.maximum(end - begin, 0))


@gluon.jit
def token_offset(H, batch, token, b, t, h):
    """Return the offset of this block's head at a token, from the strides."""
    return batch.to(gl.int64) * b + token.to(gl.int64) * t + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def segment_index(H, axis: gl.constexpr):
    """Return this block's index in [B, segments, H]; segments are that axis of the grid."""
    batch = (gl.program_id(0) // H).to(gl.int64)
    return (batch * gl.num_programs(axis) + gl.program_id(axis)) * H + gl.program_id(0) % H


@gluon.jit
def packed_sequence(cu_ptr, n, T):
    """Return the n-th packed sequence."""
    # offsets that are wrong must not lead out of the tensors
    begin = gl.minimum(gl.maximum(gl.load(cu_ptr + n), 0), T).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(cu_ptr + n + 1), 0), T).to(gl.int32)
    chunk = begin // CHUNK + n
    shift = begin - chunk * CHUNK
    return PackedSequence(chunk0=chunk, shift=shift, end=gl.maximum(end, begin) - shift)


@gluon.jit
def _find_sequence(cu_ptr, place, tokens, sequences, T):
    """Return the last sequence whose chunks, or segments, of `tokens` tokens do not begin behind the place-th one."""
    n = place * 0
    behind = n + sequences
    while behind - n > 1:
        middle = (n + behind) // 2
        first = gl.minimum(gl.maximum(gl.load(cu_ptr + middle), 0), T).to(gl.int32) // tokens + middle
        n = gl.where(first > place, n, middle)
        behind = gl.where(first > place, middle, behind)
    return n


@gluon.jit
def packed_chunk(cu_ptr, chunk, sequences, T):
    """Return the bounds of a chunk's sequence; a chunk of no sequence begins at its end or behind it."""
    n = _find_sequence(cu_ptr, chunk, CHUNK, sequences, T)
    _chunk0, shift, end = packed_sequence(cu_ptr, n, T)
    return PackedBounds(shift=shift, end=end)


@gluon.jit
def packed_segment(cu_ptr, place, segment_chunks, sequences, T):
    """Return the place-th segment of `segment_chunks`."""
    tokens = segment_chunks * CHUNK
    n = _find_sequence(cu_ptr, place, tokens, sequences, T)
    chunk, shift, end = packed_sequence(cu_ptr, n, T)
    part = place - (chunk * CHUNK + shift) // tokens - n
    parts = gl.maximum(gl.cdiv(end - chunk * CHUNK, tokens), 1)
    # a segment of no sequence is behind all chunks, where nothing is kept
    chunk = gl.where(part < parts, chunk + part * segment_chunks, T // CHUNK + sequences)
    end = gl.maximum(gl.minimum(end, (chunk + segment_chunks) * CHUNK), chunk * CHUNK)
    return PackedSegment(chunk0=chunk, shift=shift, end=end, sequence=n, segment=part, segments=parts)


@gluon.jit
def sequence_offset(packed, H, b, t, h):
    """Return the offset of this block's head at token 0 of its chunks, from the strides.

    packed: PackedBounds, or anything else with a shift; None of a batch.
    """
    if packed is None:
        return head_offset(H, b, h)
    else:
        return packed.shift.to(gl.int64) * t + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def chunk_coords(packed, chunk, H):
    """Return a chunk's batch row and first token. packed: as for sequence_offset."""
    if packed is None:
        return gl.program_id(0) // H, chunk * CHUNK
    else:
        return gl.program_id(0) * 0, chunk * CHUNK + packed.shift
