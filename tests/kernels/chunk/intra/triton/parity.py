"""The Triton and Hopper kernels of intra_chunk, called as backends are, against the PyTorch backend in float64."""

import torch

from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.chunk.intra.hopper.backend import HopperIntraChunk
from holdfast.kernels.chunk.intra.torch.backend import ChunkedIntraChunk
from holdfast.kernels.chunk.intra.triton.backend import TritonIntraChunk
from holdfast.planner import Plan
from holdfast.recurrences import Draw
from parity import relative_error

# operands of tensor cores are rounded to the inputs' dtype, once more than the PyTorch backend rounds
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
NAMES = ("q", "k", "v", "g", "states", "gate")


def plan(block=16, columns=16, stages=1, warps=4):
    return Plan("triton", tuple(locals().items()))


def hopper(slots):
    """Of the forward pass."""
    return Plan("hopper", (("slots", slots),))


def hopper_backward(warps=None, slots=14):
    """warps: of chunks in one tile; without, of those in several."""
    return Plan("hopper", (("slots", slots),) if warps is None else (("warps", warps),))


BACKENDS = {backend.name: backend for backend in (TritonIntraChunk(), HopperIntraChunk())}


def call(dtype, given, length, chunk, batch=1, heads=2, groups=1, keys=16, values=24, harsh=False, device="cpu"):
    """given: of g, states and gate, those to draw. harsh: a fifth of the decays at -50 a step, and beyond."""
    draw = Draw(0, dtype, device)
    tensors = {
        "q": draw.normal(batch, length, groups, keys),
        "k": draw.normal(batch, length, groups, keys),
        "v": draw.normal(batch, length, heads, values),
        "g": draw.log_decay(batch, length, heads),
        "states": draw.state(batch, -(-length // chunk), heads, keys, values),
        "gate": draw.normal(batch, length, heads, values),
    }
    if harsh:
        coin = torch.rand(tensors["g"].shape, generator=torch.Generator().manual_seed(0)).to(device)
        tensors["g"] = tensors["g"].masked_fill(coin < 0.2, -50.0).masked_fill(coin < 0.05, -torch.inf)
    present = {name: x if name in ("q", "k", "v", *given.split()) else None for name, x in tensors.items()}
    return IntraChunkCall(**present, scale=keys**-0.5, chunk_size=chunk)


def run(backend, forward, backward, given, grad_o):
    o = backend.forward(forward, given)
    return [o, *(x for x in backend.backward(backward, given, grad_o.to(o.dtype)) if x is not None)]


def check(dtype, forward, backward, given="g states gate", activation="silu", device="cpu", half_states=False, **shape):
    """Returns the relative errors of the output and of each gradient. half_states: states in dtype, not in float32."""
    dtype = getattr(torch, dtype)
    mine = call(dtype, given, device=device, **shape)._replace(gate_activation=activation)
    if half_states and mine.states is not None:
        mine = mine._replace(states=mine.states.to(dtype))
    wide = {name: x.double() for name in NAMES if (x := getattr(mine, name)) is not None}
    grad_o = Draw(7, dtype, device).normal(*mine.v.shape)
    plain = Plan("chunked", (("chunks", 4),))
    right = run(ChunkedIntraChunk(), plain, plain, mine._replace(**wide), grad_o)
    got = run(BACKENDS[forward.backend], forward, backward, mine, grad_o)
    errors = [relative_error(x.double(), y) for x, y in zip(got, right, strict=True)]
    assert all(error <= LIMITS[dtype] for error in errors), (dtype, str(forward), str(backward), given, shape, errors)
    return errors


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    print("float16", check("float16", plan(), plan(), length=50, chunk=40))
    print("whole", check("float32", plan(), plan(columns=32), length=45, chunk=16, heads=4, groups=2))
    print("harsh", check("float32", plan(), plan(), length=32, chunk=32, harsh=True))
    print("bare", check("float32", plan(block=32, columns=32), plan(), given="", length=33, chunk=20, groups=2))
