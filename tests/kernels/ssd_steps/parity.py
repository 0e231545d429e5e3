"""The kernels of step sizes and log decays, called as their backend is, against the PyTorch form in float64."""

import torch

from holdfast.kernels.ssd_steps.call import StepsCall
from holdfast.kernels.ssd_steps.torch.backend import PyTorchSteps
from holdfast.kernels.ssd_steps.triton.backend import TritonSteps
from parity import relative_error

NAMES = ("step", "g", "ddt", "dA", "dbias")


def example(B=2, T=37, H=5, dtype=torch.float32, bias=True, softplus=True, log=True, device="cpu"):
    """A call, dt a slice of a wider tensor as a projection leaves it."""
    draw = torch.Generator().manual_seed(H)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    dt = (4 * normal(B, T, 2 * H + 1)).to(device, dtype)[..., H : 2 * H]
    A = normal(H).to(device)
    return StepsCall(dt, A if log else -A.exp(), normal(H).to(device) if bias else None, softplus, log)


def run(backend, call, grads, into=None):
    found = [*backend.forward(call), *backend.backward(call, *grads, into)]
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def check(call):
    """At most twice the error of the PyTorch form, whose one rounding of a float32 result is the same."""
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(call.dt.shape, generator=draw).to(call.dt.device) for _ in range(2)]
    wide = {name: x.double() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    right = run(PyTorchSteps(), call._replace(**wide, dtype=torch.float64), [x.double() for x in grads])
    same = run(PyTorchSteps(), call, grads)
    got = run(TritonSteps(), call, grads)
    assert {name: (x.dtype, x.shape) for name, x in got.items()} == {
        name: (x.dtype, x.shape) for name, x in same.items()
    }
    assert all(x.is_contiguous() for x in got.values())
    for name, x in right.items():
        mine, theirs = (relative_error(found[name].double(), x) for found in (got, same))
        assert mine <= max(2 * theirs, 1e-6), (name, mine, theirs)
    # into a part of a wider tensor, of which nothing else changes
    room = torch.zeros(*call.dt.shape[:2], 2 * call.dt.shape[2], dtype=call.dt.dtype, device=call.dt.device)
    before, into, after = room.split((1, call.dt.shape[2], call.dt.shape[2] - 1), -1)
    run(TritonSteps(), call, grads, into)
    assert torch.equal(into, got["ddt"])
    assert not before.any()
    assert not after.any()


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(example())
    check(example(bias=False, log=False))
    check(example(softplus=False, H=1))
    check(example(H=40, T=70, dtype=torch.float16))
    check(example(T=1, softplus=False, bias=False, log=False))
    check(example(T=0))
    print("all checked")
