"""Sums over the heads of a group, against PyTorch in float64: interpreted and on a GPU."""

import torch

from holdfast.kernels.lib.triton.group_sum import sum_over_groups, ungroup
from parity import relative_error


def check(shape, group, dtype=torch.bfloat16, out=None, device="cpu"):
    """shape: of the sums, [B, T, Hq, K]. out: their dtype, if it is another than that of what is added."""
    batch, length, heads, keys = shape
    draw = torch.Generator().manual_seed(0)
    dq, dk = (torch.randn(batch, length, heads * group, keys, generator=draw).to(device, dtype) for _ in range(2))
    out = out or dtype
    found = [torch.full(shape, torch.nan, dtype=out, device=device) for _ in range(2)]
    sum_over_groups(dq, dk, *found)
    for parts, sums in zip((dq, dk), found, strict=True):
        exact = parts.double().unflatten(2, (heads, -1)).sum(3)
        # rounded once, of sums in float32 whose order is their own
        assert ((sums.double() - exact).abs() <= torch.finfo(out).eps * exact.abs() + 2e-6 * group**0.5).all()
        if sums.numel():
            assert relative_error(sums.double(), exact) <= {torch.float32: 3e-7}.get(out, torch.finfo(out).eps / 2)
    again = ungroup(dq, dk, heads)
    assert all(x.dtype == dtype and x.is_contiguous() for x in again)
    if out == dtype:
        assert all(torch.equal(x, y) for x, y in zip(again, found, strict=True))
    assert (again[0] is dq) == (group == 1)


def interpreted():
    check((2, 7, 1, 128), 24)
    check((1, 5, 2, 192), 3)
    check((2, 3, 2, 64), 2, torch.float16)
    check((1, 9, 1, 40), 13, torch.float32)
    check((1, 9, 3, 104), 5, torch.float32, torch.bfloat16)
    check((1, 1, 1, 7), 64)
    check((2, 3, 1, 17), 11, torch.float32, torch.float16)
    check((1, 70, 3, 16), 1)
    check((2, 0, 2, 16), 4)
    print("all checked")
