"""The Triton and the Hopper scan of states between chunks, called as their backends are, against the plain loop."""

import torch

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.inter.hopper.backend import HopperInterChunkScan
from holdfast.kernels.chunk.inter.torch.backend import ChunkedInterChunkScan
from holdfast.kernels.chunk.inter.triton.backend import TritonInterChunkScan
from holdfast.planner import Plan
from holdfast.recurrences import Draw
from parity import relative_error

LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def plan(block_k=8, block_v=4, group=2, warps=1, stages=1):
    return Plan("triton", tuple(locals().items()))


def hopper(keys=16, stages=2, columns=16):
    """Of both passes; stages of the backward pass."""
    values = {"block_k": keys, "block_v": columns, "group": 4, "warps": columns // 8, "stages": stages}
    return Plan("hopper", tuple(values.items()))


BACKENDS = {backend.name: backend for backend in (TritonInterChunkScan(), HopperInterChunkScan())}


def call(dtype, vector=False, rank=0, batch=2, chunks=7, heads=3, keys=5, values=6, sequences=None, device="cpu"):
    draw = Draw(0, dtype, device)
    shape = (batch, chunks, heads, keys) if vector else (batch, chunks, heads)
    # |W Y^T| is about 1: what is erased counts, and no state grows out of float16
    scale = 1 / (keys**0.5 + rank**0.5)
    factors = (draw.normal(batch, chunks, heads, keys, rank, scale=scale) for _ in range(2)) if rank else (None, None)
    return InterChunkCall(
        draw.normal(batch, chunks, heads, keys, values),
        draw.log_decay(*shape),
        *factors,
        draw.state(sequences or batch, heads, keys, values),
    )


def run(backend, forward, backward, given, cu_seqlens=None):
    """h, final state and the gradients for drawn cotangents."""
    h, final = backend.forward(forward, given, cu_seqlens)
    draw = Draw(7, torch.float64)
    grad_o, grad_final = draw.normal(*h.shape).to(h), draw.normal(*final.shape).to(final)
    history = h if h.element_size() >= 4 else None
    return [
        h,
        final,
        *(x for x in backend.backward(backward, given, cu_seqlens, history, grad_o, grad_final) if x is not None),
    ]


def check(dtype, which, packed=None, device="cpu", backward=None, **shape):
    """Returns the relative errors of outputs and gradients. backward: the plan of that pass, where it is another."""
    dtype = getattr(torch, dtype)
    # offsets need not be contiguous
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    sequences = len(packed) - 1 if packed else None
    given = call(dtype, sequences=sequences, device=device, **({"batch": 1} if packed else {}), **shape)
    exact = InterChunkCall(*(None if x is None else x.double() for x in given))
    got = run(BACKENDS[which.backend], which, backward or which, given, cu_seqlens)
    right = run(ChunkedInterChunkScan(), None, None, exact, cu_seqlens)
    errors = [relative_error(x.double(), y) for x, y in zip(got, right, strict=True)]
    assert all(error <= LIMITS[dtype] for error in errors), (dtype, str(which), packed, shape, errors)
    return errors


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    small = {"batch": 1, "chunks": 3, "heads": 1}
    print("float16", check("float16", plan(), **small))
    print("float16", check("float16", plan(16, 16, 1), rank=2, **small))
    print("rows", check("float32", plan(), vector=True, **small))
    print("rows", check("float32", plan(16, 16, 1), vector=True, rank=2, **small))
    print("packed", check("float32", plan(2, 2, 4), [0, 0, 2, 3, 3], chunks=3, heads=1))
    print("packed", check("float32", plan(16, 16, 1), [0, 0, 2, 3, 3], rank=3, chunks=3, heads=1))
