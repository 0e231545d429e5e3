"""Sums of the log decay's gradient over all tokens: what they share of its rounding is all that such a sum shows."""

import pytest
import torch

import holdfast
from holdfast.cli.bench.draw import DeviceDraw
from holdfast.recurrences import Sizes
from holdfast.recurrences.ssd import SSD
from parity import relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize(("V", "Hq"), [(128, 32), (64, 1)])
def test_the_gradient_of_a_rate_that_all_tokens_share(V, Hq, backend):
    # the draw of the bench, in whose weakest decay a state every eighth chunk was too few: 3.5e-2
    sizes = Sizes(B=4, T=4096, H=32, K=128, V=V, Hq=Hq)
    drawn = SSD.example(DeviceDraw(0, torch.bfloat16, "cuda"), sizes)
    arguments = {name: drawn[name] for name in ("x", "dt", "A", "B", "C")}
    draw = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(arguments["x"].shape, generator=draw, device="cuda").to(torch.bfloat16)

    def gradient(which, wide):
        given = {name: x.double() if wide else x for name, x in arguments.items()}
        given["A"].requires_grad_()
        y, _ = holdfast.ssd(**given, backend=which)
        return torch.autograd.grad(y, given["A"], grad.to(y.dtype))[0]

    exact = gradient("chunked", True)
    assert relative_error(gradient(backend, False).double(), exact) <= 1.5e-2
