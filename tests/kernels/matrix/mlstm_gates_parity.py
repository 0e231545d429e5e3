"""mLSTM's gates in one launch, against the PyTorch mapping in float64: interpreted and on a GPU."""

import torch

from holdfast.kernels.matrix import triton_mlstm_gates as kernel
from holdfast.recurrences.mlstm import gates
from parity import relative_error


def check(B=2, T=37, H=3, packed=None, exponential=True, dtype=torch.float32, strength=1.0, device="cpu"):
    draw = torch.Generator().manual_seed(T)
    i, f = (strength * torch.randn(B, T, H, generator=draw) for _ in range(2))
    sequences = len(packed) - 1 if packed else B
    m = torch.randn(sequences, H, generator=draw).to(device)
    i, f = i.to(device, dtype), (f + 2).to(device, dtype)
    # offsets may be a view
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    leaves = [x.double().requires_grad_() for x in (i, f, m)]
    exact = gates(*leaves, cu_seqlens, exponential, torch.float64)
    *found, share = kernel.forward(i, f, m, cu_seqlens, exponential)
    cotangents = [torch.randn(x.shape, generator=draw).to(device) for x in found]
    total = sum((x * y.double()).sum() for x, y in zip(exact, cotangents, strict=True))
    grads = torch.autograd.grad(total, leaves)
    got = [*found, *kernel.backward(i, f, m, cu_seqlens, exponential, (found[1], found[2], share), *cotangents)]
    errors = [relative_error(x.double(), y) for x, y in zip(got, [*exact, *grads], strict=True)]
    limits = [1e-6] * 4 + [2.0**-7 if dtype == torch.bfloat16 else 1e-6] * 2 + [1e-6]
    case = (B, T, H, packed, exponential, dtype, strength)
    assert all(error <= limit for error, limit in zip(errors, limits, strict=True)), (case, errors)
    print(case, [f"{error:.0e}" for error in errors])


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    kernel.BLOCK = 16
    check()
    check(exponential=False)
    check(B=1, packed=(0, 0, 5, 37, 37))
    check(B=1, packed=(0, 0, 5, 37, 37), exponential=False)
    check(strength=20.0)
    check(T=1)
    check(T=0)
    check(T=0, exponential=False)
    nan_shows()


def nan_shows(device="cpu"):
    """A NaN of f is in all that follows, one of i in its own token's strength, and so in all states that follow."""
    i, f = (torch.zeros(1, 37, 2, device=device) for _ in range(2))
    i[0, 20, 0] = f[0, 3, 1] = torch.nan
    g, beta, floor, last, _ = kernel.forward(i, f, None, None, True)
    assert beta[0, 20, 0].isnan()
    assert not beta[0, :20, 0].isnan().any()
    assert all(x[0, 3:, 1].isnan().all() and not x[0, :3].isnan().any() for x in (g, beta, floor))
    assert last[0, 1].isnan()
