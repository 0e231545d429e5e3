"""Outputs of a state in slices of K: a launch a slice, and between them their sums so far in float32.

[chunks, H, slices of V, V, 64]: transposed like the products that write it: a thread's numbers lie side by side.
Sequence n's chunks are from n ceil(T / 64) on; of packed sequences from first // 64 + n on, as none shares a chunk.
"""

from .compat import gl, gluon
from .decay import CHUNK
from .split import opaque


@gluon.jit
def slice_sums_offset(place, H, V: gl.constexpr, PACKED: gl.constexpr):
    """Return the offset of a block's first chunk. place: Tokens, or its batch, first token and length."""
    batch, first, length = place
    if PACKED:
        chunk = first // CHUNK + gl.program_id(0) // H
    else:
        chunk = batch * gl.cdiv(length, CHUNK)
    slices = chunk.to(gl.int64) * H + gl.program_id(0) % H
    return (slices * gl.num_programs(1) + gl.program_id(1)) * (V * CHUNK)


@gluon.jit
def slice_sums_stride(H, V: gl.constexpr):
    """Return the offset from one chunk to the next."""
    return (H * gl.num_programs(1)).to(gl.int64) * (V * CHUNK)


@gluon.jit
def slice_sums_index(V: gl.constexpr, layout: gl.constexpr):
    """Return offsets in a chunk's output [V, 64]; computed at each use, since kept they take a register a number."""
    rows = opaque(gl.arange(0, V, gl.SliceLayout(1, layout)))
    return rows[:, None] * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
