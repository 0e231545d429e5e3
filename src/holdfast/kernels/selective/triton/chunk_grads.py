"""The gradients of B and C: the sum of the parts that blocks of channels leave, in the same order in every run."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sequence import chunk_coords


@triton.jit
def _add_up(parts, into, count, size, inside, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """parts, into: pointers [CHUNK, BLOCK], of the first part."""
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    # not counted down: of a single part, count is a constant to the compiler
    for _ in range(count):
        total += tl.load(parts, mask=inside, other=0.0)
        parts += size
    tl.store(into, total.to(into.dtype.element_ty), mask=inside)


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
    coords = chunk_coords(place, cu_seqlens, T, sequences, 0, chunks, CHUNK)
    batch, start, end = coords[1], coords[2] + coords[4] * CHUNK, coords[3]
    row = tl.arange(0, CHUNK)
    at = (place.to(tl.int64) * groups + group) * (PADDED * CHUNK)
    to = ((batch * T + start) * groups + group) * N
    for n0 in tl.static_range(0, PADDED, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        inside = (start + row < end)[:, None] & (n < N)[None, :]
        part = at + n[None, :] * CHUNK + row[:, None]
        out = to + row[:, None] * (groups * N) + n[None, :]
        _add_up(parts_B + part, dB + out, count, size, inside, CHUNK, BLOCK)
        _add_up(parts_C + part, dC + out, count, size, inside, CHUNK, BLOCK)
