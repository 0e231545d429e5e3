"""The gradients of B and C: the sum of the parts that blocks of channels leave, in the same order in every run."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sequence import chunk_coords


@triton.jit
def _add_up(parts, into, count, size, row, n, stride, kept, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for _ in range(count):
        total += tl.load(parts + n[None, :] * CHUNK + row[:, None])
        parts += size
    tl.store(into + row[:, None] * stride + n[None, :], total.to(into.dtype.element_ty), mask=kept)


@triton.jit
def selective_group_grads(
    parts_B, parts_C, dB, dC, cu_seqlens, T, sequences, chunks, N, count, size,
    CHUNK: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (places, G), places of chunk_coords; chunks: of a sequence, where all are equal.

    parts_B, parts_C [count, places, G, PADDED, CHUNK] float32; size: of one of count
    dB, dC [B, T, G, N], contiguous, written
    """
    groups = tl.num_programs(1)
    place, group = tl.program_id(0), tl.program_id(1)
    _, batch, first, end, chunk = chunk_coords(place, cu_seqlens, T, sequences, 0, chunks, CHUNK)
    start = first + chunk * CHUNK
    row = tl.arange(0, CHUNK)
    at = (place.to(tl.int64) * groups + group) * (PADDED * CHUNK)
    to = ((batch * T + start) * groups + group) * N
    for n0 in tl.static_range(0, PADDED, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        kept = (start + row < end)[:, None] & (n < N)[None, :]
        _add_up(parts_B + at, dB + to, count, size, row, n, groups * N, kept, CHUNK, BLOCK)
        _add_up(parts_C + at, dC + to, count, size, row, n, groups * N, kept, CHUNK, BLOCK)
