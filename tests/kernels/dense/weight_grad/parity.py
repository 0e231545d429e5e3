"""The product that forms dR, in Triton's interpreter, against sums in float64; see test_weight_grad.py.

In float16: the interpreter multiplies no bfloat16.
"""

from types import SimpleNamespace

import torch

from holdfast.kernels.dense.weight_grad.select import partial_weight_grads, sum_partials
from parity import relative_error


def check(B, T, G, H, D, initial=True, reset=None):
    torch.manual_seed(0)
    dg, h = torch.randn(B, T, G, H, D).half(), torch.randn(B, T, H, D).half()
    entry = torch.randn(B, H, D) if initial else None
    parts = partial_weight_grads(dg, h, entry, reset)
    (got,) = sum_partials([parts], torch.float32)
    first = torch.zeros(B, 1, H, D).half() if entry is None else entry[:, None].half()
    before = torch.cat([first, h[:, :-1]], 1).double()
    if reset is not None:
        before = before.masked_fill(reset[:, :, None, None], 0)
    right = torch.einsum("btghi,bthj->ghij", dg.double(), before)
    assert relative_error(got.double(), right) <= 1e-6, (B, T, G, H, D)
    assert torch.equal(sum_partials([parts], torch.float16)[0], got.half())


def interpreted():
    # many SMs, so that the tokens are cut into parts
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=64)
    several = [torch.randn(shape) for shape in ((1, 3), (5, 2, 300), (2, 700))]
    for count in (1, 2, 3):
        for found, parts in zip(sum_partials(several[:count], torch.float16), several, strict=False):
            assert torch.equal(found, parts.sum(0).half())
    check(3, 200, 2, 2, 24)
    check(2, 300, 1, 1, 40, initial=False)
    check(1, 1, 3, 1, 8)
    resets = torch.rand(7, 100) < 0.2
    check(7, 100, 2, 1, 16, reset=resets)
    check(7, 100, 2, 1, 16, reset=resets.T.contiguous().T)
    check(7, 100, 2, 1, 16, reset=resets[:1].expand(7, 100))
