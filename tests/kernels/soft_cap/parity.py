"""The soft cap's kernels, called as their op calls them, against PyTorch in float64."""

import torch

from holdfast.kernels.soft_cap.triton import backend as triton_soft_cap
from parity import relative_error


def check(shape=(2, 7, 6), dtype=torch.float32, cap=15.0, scale=10.0, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    # every second row of a wider tensor
    x = (scale * torch.randn(shape[0], 2 * shape[1], *shape[2:], generator=draw)).to(dtype).to(device)[:, ::2]
    dy = torch.randn(shape, generator=draw).to(device)
    (right, exact), (same, theirs) = plain(x.double(), dy.double(), cap), plain(x.float(), dy, cap)
    y, dx = triton_soft_cap.run_forward(x, cap), triton_soft_cap.run_backward(x, dy, cap)
    assert (y.dtype, dx.dtype) == (torch.float32, dtype)
    assert y.is_contiguous()
    assert dx.is_contiguous()
    if x.numel():
        assert relative_error(y.double(), right) <= max(2 * relative_error(same.double(), right), 2e-7)
        by_torch = relative_error(theirs.to(dtype).double(), exact)
        assert relative_error(dx.double(), exact) <= max(2 * by_torch, 2e-7)
        # near 0 it is x
        assert ((y.double() - right).abs() <= 5e-7 * right.abs()).all()


def plain(x, dy, cap):
    x = x.detach().requires_grad_()
    y = cap * torch.tanh(x / cap)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check()
    check(scale=1e-3)
    check(scale=500.0, cap=2.5)
    check((3, 400, 3), dtype=torch.float16)
    check((2, 0, 4))
    print("all checked")
