"""B and C of every chunk in float32, the tokens of a chunk side by side.

They are few numbers beside x, and every block of channels reads them: so laid out, a thread loads four tokens at once.
Behind the end of a sequence and of the state there are zeros.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sequence import chunk_coords


@triton.jit
def _lay_out(source, into, row, stride, n, live, there, CHUNK: tl.constexpr):
    found = tl.load(source + row[:, None] * stride + n[None, :], mask=live[:, None] & there[None, :], other=0.0)
    tl.store(into + n[None, :] * CHUNK + row[:, None], found.to(tl.float32))


@triton.jit
def selective_prepare(
    B, C, laid_B, laid_C, cu_seqlens, T, sequences, chunks, N,
    B_batch, B_step, B_group, C_batch, C_step, C_group,
    CHUNK: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (places * G,), places of chunk_coords; chunks: of a sequence, where all are equal.

    B, C [B, T, G, N], strides, the last axis side by side
    laid_B, laid_C [places, G, PADDED, CHUNK] float32, written
    """
    groups = tl.num_programs(1)
    place, group = tl.program_id(0), tl.program_id(1)
    coords = chunk_coords(place, cu_seqlens, T, sequences, 0, chunks, CHUNK)
    batch, start, end = coords[1], coords[2] + coords[4] * CHUNK, coords[3]
    row = tl.arange(0, CHUNK)
    live = start + row < end
    B += batch * B_batch + start * B_step + group * B_group
    C += batch * C_batch + start * C_step + group * C_group
    to = (place.to(tl.int64) * groups + group) * (PADDED * CHUNK)
    for n0 in tl.static_range(0, PADDED, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        _lay_out(B, laid_B + to, row, B_step, n, live, n < N, CHUNK)
        _lay_out(C, laid_C + to, row, C_step, n, live, n < N, CHUNK)
