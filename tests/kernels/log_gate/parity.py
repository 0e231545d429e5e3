"""The kernels of a gate's log decay, called as their backend is, against the PyTorch form in float64."""

import torch

from holdfast.kernels.log_gate.torch.backend import PyTorchLogGate
from holdfast.kernels.log_gate.triton.backend import TritonLogGate
from parity import relative_error


def check(*shape, dtype=torch.float32, device="cpu"):
    """At most twice the error of the PyTorch form, whose one rounding of a float32 result is the same."""
    draw = torch.Generator().manual_seed(0)
    x = (8 * torch.randn(*shape, 2, generator=draw)).to(device, dtype)[..., 0]
    bias, dg = (torch.randn(size, generator=draw).to(device) for size in (shape[-1:], shape))

    def run(backend, x, bias, dg):
        return backend.forward(x, bias, 16.0), *backend.backward(x, bias, 16.0, dg)

    right = run(PyTorchLogGate(), x.double(), bias.double(), dg.double())
    for got, plain, exact in zip(
        run(TritonLogGate(), x, bias, dg), run(PyTorchLogGate(), x, bias, dg), right, strict=True
    ):
        assert (got.dtype, got.shape, got.is_contiguous()) == (plain.dtype, exact.shape, True)
        assert relative_error(got.double(), exact) <= max(2 * relative_error(plain.double(), exact), 1e-6)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(2, 7, 100)
    check(1, 300, 13, dtype=torch.float16)
    check(2, 0, 4)
    print("all checked")
