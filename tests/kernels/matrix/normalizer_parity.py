"""The gradients of a normalised output's quotient, against float64."""

import torch

from holdfast.kernels.matrix import hopper_mlstm_launch
from parity import relative_error


def check(B=2, T=19, H=3, V=64, device="cpu"):
    draw = torch.Generator().manual_seed(T)
    u, num = (torch.randn(B, T, H, V, generator=draw).to(device) for _ in range(2))
    norm = torch.randn(B, T, H, generator=draw).to(device)
    floor = torch.rand(B, T, H, generator=draw).to(device)
    norm[0, :2], floor[0, :2] = 0.0, 0.5
    floor[0, 2], floor[1, 3] = norm[0, 2].abs(), norm[1, 3].abs()
    leaves = [x.double().requires_grad_() for x in (num, norm, floor)]
    o = leaves[0] / (torch.maximum(leaves[1].abs(), leaves[2]) + 1e-6)[..., None]
    _, dnorm, dfloor = torch.autograd.grad(o, leaves, u.double())
    # the output where the kernel finds it among others, and norm a head's tokens side by side
    o = torch.stack([o.detach().float()] * 2, 3)[:, :, :, 1]
    by_head = norm.transpose(1, 2).contiguous()
    (inverse, slope), grad_floor = hopper_mlstm_launch.run_output_gradient(u, o, by_head, floor, 1e-6)
    exact = 1 / (torch.maximum(norm.abs(), floor).double() + 1e-6)
    found = (inverse.transpose(1, 2), exact), (slope.transpose(1, 2), dnorm), (grad_floor, dfloor)
    errors = [relative_error(x.double(), y) for x, y in found]
    assert max(errors) <= 1e-6, (B, T, H, V, errors)
    print(V, "columns", [f"{error:.0e}" for error in errors])


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check()
    check(B=2, T=8, H=9, V=40)
