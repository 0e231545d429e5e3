"""Where sequences, chunks and segments are: offsets of heads, tokens and packed sequences."""

from .compat import gl, gluon
from .decay import CHUNK


@gluon.jit
def of_head(H, b, h):
    """Where this block's batch and head begin, from their strides."""
    return (gl.program_id(0) // H).to(gl.int64) * b + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def sequence_bounds(cu_ptr, T, H):
    """This block's batch, its first token and how many it has: all of a batch's T, or a packed sequence's."""
    if cu_ptr is None:
        return gl.program_id(0) // H, T * 0, T
    else:
        bounds = cu_ptr + gl.program_id(0) // H
        # offsets that are wrong must not lead out of the tensors
        begin = gl.minimum(gl.maximum(gl.load(bounds), 0), T).to(gl.int32)
        end = gl.minimum(gl.maximum(gl.load(bounds + 1), 0), T).to(gl.int32)
        return gl.program_id(0) * 0, begin, gl.maximum(end - begin, 0)


@gluon.jit
def of_token(H, batch, token, b, t, h):
    """Where this block's head is at a token, from the strides."""
    return batch.to(gl.int64) * b + token.to(gl.int64) * t + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def of_segment(H, axis: gl.constexpr):
    """This block's place in [B, segments, H], segments being that axis of the grid."""
    batch = (gl.program_id(0) // H).to(gl.int64)
    return (batch * gl.num_programs(axis) + gl.program_id(axis)) * H + gl.program_id(0) % H


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
def chunk_coords(aside, chunk, H):
    """A chunk's batch and first token."""
    if aside is None:
        return gl.program_id(0) // H, chunk * CHUNK
    else:
        return gl.program_id(0) * 0, chunk * CHUNK + aside[0]
