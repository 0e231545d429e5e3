"""The rotation's kernel, called as its op calls it, against its PyTorch form in float64."""

import math

import torch

from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.kernels.rotary.triton import backend as triton_rotary
from parity import relative_error


def example(B=2, T=7, Hq=3, Hk=2, D=20, dtype=torch.float32, device="cpu"):
    """q and k, parts of one projection."""
    draw = torch.Generator().manual_seed(D)
    wide = torch.randn(B, T, (Hq + Hk + 1) * D, generator=draw).to(dtype).to(device)
    q, k, _ = wide.split([Hq * D, Hk * D, D], -1)
    return q.unflatten(-1, (Hq, D)), k.unflatten(-1, (Hk, D))


def check(given, position=None, base=10000.0):
    """At most twice the error of the PyTorch form, whose one rounding of a float32 result is the same; forth and back.

    position: of tokens, or the first of them.
    """
    q, k = given
    steps = torch.arange(q.shape[1], device=q.device)[None]
    if isinstance(position, int):
        position = position + steps
    right = [rotate(x.double(), steps if position is None else position, base) for x in given]
    same = [rotate(x, steps if position is None else position, base) for x in given]
    made = triton_rotary.run(q, k, position, base, False)
    floor = 2e-7 if q.dtype == torch.float32 else 0.0
    for x, exact, theirs in zip(made, right, same, strict=True):
        assert x.dtype == q.dtype
        assert x.is_contiguous()
        assert x.shape == exact.shape
        if x.numel():
            mine, by_torch = (relative_error(y.double(), exact) for y in (x, theirs))
            assert mine <= max(2 * by_torch, floor), (mine, by_torch)
    # heads in another order, as a gradient may come
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    for x, exact in zip(triton_rotary.run(*turned, position, base, True), given, strict=True):
        assert not x.numel() or relative_error(x.double(), exact.double()) <= max(floor, 4 * torch.finfo(q.dtype).eps)
    # as parts of a wider tensor
    widths = [math.prod(x.shape[2:]) for x in given]
    wide = q.new_full((*q.shape[:2], 8 + sum(widths)), torch.nan)
    places = [x.unflatten(-1, of.shape[2:]) for x, of in zip(wide[..., 8:].split(widths, -1), given, strict=True)]
    assert triton_rotary.run(q, k, position, base, False, tuple(places)) == tuple(places)
    assert all(torch.equal(x, y) for x, y in zip(places, made, strict=True))
    assert wide[..., :8].isnan().all()


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(example())
    check(example(D=2, Hq=1))
    check(example(D=128, Hk=3, T=40), 10**6)
    check(example(dtype=torch.float16), 2**31 - 10, base=1e6)
    check(example(dtype=torch.float16), torch.tensor([[5, 0, 1, 2, 0, 999_999, 3]], dtype=torch.int32))
    check(example(), torch.randint(-5, 10**6, (2, 14))[:, ::2])
    check(example(), 12345, base=0.5)
    check(example(T=1), 77)
    check(example(T=0))
    print("all checked")
