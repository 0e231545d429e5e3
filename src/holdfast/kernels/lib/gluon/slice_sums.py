"""Outputs of a state in slices of K: a launch a slice, and in float32 between them what the outputs add up to.

[chunks, H, slices of V, V, 64]: transposed like the products that write it: a thread's numbers lie side by side.
Sequence n's chunks are from n ceil(T / 64) on; of packed sequences from first // 64 + n on, as none shares a chunk.
"""

from .compat import gl, gluon
from .decay import CHUNK
from .split import opaque


@gluon.jit
def slice_sums_offset(place, H, V: gl.constexpr, PACKED: gl.constexpr):
    """Where a block's first chunk is. place: the batch, its first token and how many it has."""
    batch, first, length = place
    if PACKED:
        chunk = first // CHUNK + gl.program_id(0) // H
    else:
        chunk = batch * gl.cdiv(length, CHUNK)
    slices = chunk.to(gl.int64) * H + gl.program_id(0) % H
    return (slices * gl.num_programs(1) + gl.program_id(1)) * (V * CHUNK)


@gluon.jit
def slice_sums_stride(H, V: gl.constexpr):
    """From one chunk to the next."""
    return (H * gl.num_programs(1)).to(gl.int64) * (V * CHUNK)


@gluon.jit
def slice_sums_index(V: gl.constexpr, layout: gl.constexpr):
    """Of a chunk's output [V, 64]; computed where it is used, since kept it would take a register a number."""
    rows = opaque(gl.arange(0, V, gl.SliceLayout(1, layout)))
    return rows[:, None] * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
