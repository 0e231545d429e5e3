"""The kernels around a linear recurrent unit's scan, called as their ops call them, against PyTorch in float64."""

import torch
import torch.nn.functional as F

from holdfast.kernels.lru.call import Gates
from holdfast.kernels.lru.torch.backend import lru_gates
from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
from holdfast.kernels.lru.triton import gates as triton_gates
from parity import relative_error

FLOORS = {torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}


def example(B=2, T=7, H=3, P=10, paired=False, dtype=torch.float32, strength=8.0, device="cpu") -> Gates:
    """u, half of a projection; gates as a product a head leaves them, heads first; some wide open, some shut."""
    draw = torch.Generator().manual_seed(P)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    C = P * (1 + paired)
    S = P + C + P * paired
    u = normal(B, T, 2 * H * C)[..., : H * C]
    gates = 3 * normal(H, B, T, S).movedim(0, 2)
    rate, phase = normal(H * P) - 4, 6 * torch.rand(H * P, generator=draw) if paired else None
    u, gates = u.to(dtype).to(device), gates.to(dtype).to(device)
    bias, rate = normal(H, S).to(device), rate.to(device)
    return Gates(u, gates, bias, rate, None if phase is None else phase.to(device), strength)


def plain(run, inputs, dtype=None):
    """Results, and gradients of their sum in weights of a draw."""
    leaves = [None if x is None else x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs]
    made = [x for x in run(*leaves) if x is not None]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(made, weights_of(made), strict=True))
    return [*made, *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


def weights_of(made):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=draw).to(x) for x in made]


def compare(got, right, same):
    """At most twice the error of the PyTorch form in the same dtypes, whose one rounding of a float32 is the same."""
    for x, exact, theirs in zip(got, right, same, strict=True):
        assert x.dtype == theirs.dtype
        assert x.shape == theirs.shape
        assert x.is_contiguous()
        if x.numel():
            mine, by_torch = (relative_error(y.double(), exact) for y in (x, theirs))
            assert mine <= max(2 * by_torch, FLOORS[x.dtype]), (mine, by_torch)


def strided(grads):
    """Every second row of a tensor of twice as many."""
    return [torch.stack([x, x], 1).flatten(0, 1)[::2] if x.numel() else x for x in grads]


def within(x):
    """Room for x [B, T, D] in a wider tensor."""
    return x.new_full((*x.shape[:2], 2 * x.shape[2] + 8), torch.nan)[..., 8 : 8 + x.shape[2]]


def check(given):
    def run(*leaves):
        return lru_gates(Gates(*leaves, given.decay_scale))

    right, same = plain(run, given[:5], torch.float64), plain(run, given[:5])
    made = [x for x in triton_gates.run_forward(given) if x is not None]
    da, dwrite, *dtheta = strided(weights_of(made))
    grads = triton_gates.run_backward(given, da, dwrite, *(dtheta or [None]))
    compare([*made, *(x for x in grads if x is not None)], right, same)
    again = triton_gates.run_backward(given, da, dwrite, *(dtheta or [None]), within(given.u))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(again, grads, strict=True))


def check_gelu(T=7, D=20, dtype=torch.float32, device="cpu"):
    draw = torch.Generator().manual_seed(D)
    h, z = (3 * torch.randn(2, T, 2 * D, generator=draw)).to(dtype).to(device).chunk(2, -1)
    right = plain(lambda h, z: (h * F.gelu(z),), (h, z), torch.float64)
    same = plain(lambda h, z: ((h.float() * F.gelu(z.float())).to(dtype),), (h, z))
    y = triton_gated_gelu.run_forward(h, z)
    (dy,) = strided(weights_of([y]))
    grads = triton_gated_gelu.run_backward(h, z, dy)
    compare([y, *grads], right, same)
    again = triton_gated_gelu.run_backward(h, z, dy, within(z))
    assert all(torch.equal(x, y) for x, y in zip(again, grads, strict=True))


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for paired in (False, True):
        check(example(paired=paired))
        check(example(paired=paired, H=1, P=300, T=20))
        check(example(paired=paired, P=64, dtype=torch.float16, strength=0.5))
        check(example(paired=paired, H=1, P=1, T=1))
        check(example(paired=paired, T=0))
    # gates that are shut and open for good: a near 1, where it has no slope, and 0
    for extreme in (-200.0, 200.0):
        given = example(H=1, P=8)
        given.gates[..., :8] = extreme
        check(given)
    check_gelu()
    check_gelu(D=300, T=5)
    check_gelu(dtype=torch.float16)
    check_gelu(T=0)
    print("all checked")
