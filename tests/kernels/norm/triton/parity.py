"""The kernels of gated_rms_norm, called as their backend is, against its PyTorch form in float64."""

import math

import torch

from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.norm.torch.backend import PyTorchGatedNorm
from holdfast.kernels.norm.triton.backend import TritonGatedNorm
from holdfast.planner import Plan
from parity import relative_error

NAMES = ("y", "do", "dgate", "dweight")


def plan(rows=4, warps=4, parts=3):
    return Plan("triton", (("rows", rows), ("warps", warps), ("parts", parts)))


def example(
    B=2, T=7, H=3, D=20, dtype=torch.float32, gate=True, weights=1, activation="silu", center=False, device="cpu"
) -> GatedNormCall:
    """o: with a mean of 1. gate: whether there is one, part of a wider tensor as a projection leaves it. weights: heads
    of weight, or 0."""
    draw = torch.Generator().manual_seed(D)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(dtype).to(device)

    gates = normal(B, T, 2 * H * D)[..., H * D :].unflatten(-1, (H, D)) if gate else None
    weight = 1 + 0.1 * normal(weights, D).float().squeeze(0) if weights else None
    return GatedNormCall(normal(B, T, H, D) + 1, gates, weight, 1e-5, activation, center)


def run(backend, which, call, grad_y, packed=False):
    """packed: whether the gradient of the gate is to be in a wider tensor."""
    into = None
    if packed and call.gate is not None:
        width = math.prod(call.o.shape[2:])
        wide = call.o.new_full((*call.o.shape[:2], 2 * width + 3), torch.nan)
        into = wide[..., 3 : 3 + width].unflatten(-1, call.o.shape[2:])
    grads = backend.backward(which, call, grad_y, into)
    if into is not None:
        assert grads[1] is into
        grads[1] = into.contiguous()
    found = dict(zip(NAMES, [backend.forward(which, call), *grads], strict=True))
    return {name: x for name, x in found.items() if x is not None}


def errors(call, which):
    """name -> (error of the kernel, error of the PyTorch form in the same dtype), relative to float64."""
    draw = torch.Generator().manual_seed(1)
    grad_y = torch.randn(call.o.shape, generator=draw).to(call.o)
    wide = call._replace(
        **{name: x.double() for name in ("o", "gate", "weight") if (x := getattr(call, name)) is not None}
    )
    right = run(PyTorchGatedNorm(), Plan("pytorch"), wide, grad_y.double())
    same = run(PyTorchGatedNorm(), Plan("pytorch"), call, grad_y)
    got = run(TritonGatedNorm(), which, call, grad_y)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same.items()}
    assert all(x.is_contiguous() for x in got.values())
    for backend, its in ((TritonGatedNorm(), which), (PyTorchGatedNorm(), Plan("pytorch"))):
        apart, packed = (run(backend, its, call, grad_y, packed) for packed in (False, True))
        assert all(torch.equal(apart[name], packed[name]) for name in apart)
    return {
        name: (relative_error(got[name].double(), x), relative_error(same[name].double(), x))
        for name, x in right.items()
    }


def check(call, which=None):
    """At most twice the error of the PyTorch form, whose one rounding of a float32 result is the same."""
    found = errors(call, which or plan())
    floor = 1e-6 if call.o.dtype == torch.float32 else 0.0
    assert all(mine <= max(2 * theirs, floor) for mine, theirs in found.values()), (call.activation, found)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(example())
    check(example(weights=3, activation="sigmoid"))
    check(example(weights=0))
    check(example(gate=False, D=16, dtype=torch.float16), plan(rows=1, parts=50))
    check(example(gate=False, weights=0, T=1))
    check(example(weights=3, D=130, dtype=torch.float16), plan(rows=8, parts=1))
    check(example(T=0))
    check(example(weights=3, activation="sigmoid", center=True))
    check(example(gate=False, weights=3, D=130, center=True), plan(rows=8, parts=1))
    check(example(weights=0, D=1, center=True))
    check(example(T=0, center=True))
    # rows beyond the last are 0, whose length nothing is added to
    check(example()._replace(eps=0.0), plan(rows=8, parts=1))
    print("all checked")
