"""The states that the Triton backward pass computes again, against those of the forward pass, bit for bit."""

from itertools import pairwise

import torch

from holdfast.kernels.diagonal.triton.backend import TritonScan
from holdfast.recurrences import RECURRENCES
from kernels.diagonal.triton import parity as scan_parity
from parity import relative_error


def check(name, dtype, length, which, packed=None, device="cpu", **sizes):
    """Half-precision inputs, and float32 ones that hold the same numbers, so that no state of theirs is rounded.

    The gradient of a gate is dh_t h_{t-1}: equal gradients show equal states. At the first of a thread's steps h_{t-1}
    is what the scan over threads hands it, which the step before, in another thread, has only to the last bit.
    """
    arguments = scan_parity.example(name, dtype, length, packed, device=device, **sizes)
    cu_seqlens = torch.tensor(packed, device=device) if packed else None
    call, _ = RECURRENCES[name].map(**arguments)
    backend, tile = TritonScan(), which["segments"] * which["steps"]
    rows = call.x.shape[0] * length // tile + (len(packed) - 1 if packed else call.x.shape[0])
    entries = torch.full((rows, call.x.shape[2]), torch.nan, device=device)
    o, final = backend.forward(which, call, cu_seqlens, entries)
    wide_call = call._replace(x=call.x.float())
    wide, wide_final = backend.forward(which, wide_call, cu_seqlens)
    assert torch.equal(wide.to(dtype), o)
    assert torch.equal(wide_final, final)

    grads = backend.backward(which, call, cu_seqlens, None, o, final, entries)
    afresh = backend.backward(which, call, cu_seqlens, None, o, final)
    assert all(torch.equal(x, y) for x, y in zip(grads, afresh, strict=True) if x is not None)

    given = backend.backward(which, wide_call, cu_seqlens, wide, o.float(), final)
    bounds = packed or [0, length]
    step = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
    inner = (step % which["steps"] != 0).to(device)
    for place, (x, y) in enumerate(zip(grads, given, strict=True)):
        if place in (1, 3):
            assert torch.equal(x, y.to(x.dtype))
        elif x is not None:
            assert torch.equal(x[:, inner], y[:, inner])
            assert relative_error(x.double(), y.double()) <= 1e-6


def interpreted():
    small = scan_parity.plan(block=4, segments=2)
    check("rglru", torch.float16, 7, small, batch=1, channels=4)
    check("rotlru", torch.float16, 7, small, [0, 3, 7], channels=4)
    print("equal")
