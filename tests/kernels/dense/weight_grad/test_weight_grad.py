"""dR of the fused backward pass: every token counted once, whatever the layout of the reset mask."""

import pytest
import torch

from holdfast.kernels.dense.weight_grad.select import WIDE, partial_weight_grads
from interpreted import interpret
from parity import relative_error


def test_the_product_is_right_in_the_interpreter():
    interpret("kernels.dense.weight_grad.parity", "interpreted")


@pytest.mark.parametrize("given", ["all", "nothing"])
def test_a_wide_head_takes_one_product(monkeypatch, given):
    # a CPU has no product of 16-bit numbers with a float32 result
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: plain(a.to(out_dtype), b.to(out_dtype)))
    B, T, G = 2, 5, 3
    dg, h = torch.randn(B, T, G, 1, WIDE).bfloat16(), torch.randn(B, T, 1, WIDE).bfloat16()
    entry, reset = (torch.randn(B, 1, WIDE).bfloat16(), torch.rand(B, T) < 0.4) if given == "all" else (None, None)
    before = torch.cat([torch.zeros(B, 1, 1, WIDE) if entry is None else entry[:, None], h[:, :-1]], 1).double()
    if reset is not None:
        before = before.masked_fill(reset[:, :, None, None], 0)
    right = torch.einsum("btghi,bthj->ghij", dg.double(), before)
    assert relative_error(partial_weight_grads(dg, h, entry, reset).sum(0).double(), right) <= 1e-6
