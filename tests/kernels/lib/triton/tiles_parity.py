"""Numbers in parts, interpreted."""

import torch
import triton
import triton.language as tl

from holdfast.kernels.lib.triton.tiles import split_hi_lo_rows


@triton.jit
def _sum_of_parts(x_ptr, like_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    parts = split_hi_lo_rows(tl.load(x_ptr + at), tl.load(like_ptr + at))
    tl.store(out_ptr + at, tl.sum(parts.to(tl.float32), 0))


def parts_of_a_number():
    """Parts of 16 bits add up to a float32 number but for its last bits, in bfloat16 too."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty_like(x)
        _sum_of_parts[(1,)](x, x.to(dtype), out, 64)
        error = ((out - x) / x).abs().max().item()
        assert error <= 2.0**-21, (dtype, error)
        print(f"parts {error:.0e}")
