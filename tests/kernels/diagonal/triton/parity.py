"""The Triton and the Hopper scan, called as their backends are, against the oracle: in the interpreter and on a GPU."""

import torch

from holdfast.kernels.diagonal.hopper.backend import HopperScan
from holdfast.kernels.diagonal.triton.backend import TritonScan
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from layouts import assert_nan_stays, assert_views_are_alike
from parity import cast, relative_error, values_and_grads

# that of `verify` in float32; of half precision the rounding of outputs, twice over
LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def plan(block=16, segments=4, steps=2, stages=1, warps=1, piece=0):
    return Plan("triton", tuple(locals().items()))


def hopper(block, steps, stages, warps, groups=1, registers=255):
    return Plan("hopper", tuple(locals().items()))


BACKENDS = {backend.name: backend for backend in (TritonScan(), HopperScan())}


def example(name, dtype, length, packed=None, batch=2, channels=18, device="cpu", forgets=True):
    """Arguments with gates of both signs and, if it forgets, zero; packed: offsets."""
    draw = Draw(0, dtype, device)
    arguments = RECURRENCES[name].example(draw, Sizes(B=1 if packed else batch, T=length, D=channels))
    if name != "hgrn":
        sign = torch.randint(-1, 2, arguments["a"].shape, generator=torch.Generator().manual_seed(1))
        arguments["a"] = arguments["a"] * (sign if forgets else 2 * sign.abs() - 1).to(device)
    if packed:
        arguments["initial_state"] = Draw(3, dtype, device).state(len(packed) - 1, channels)
    return arguments


def run(name, arguments, which, cu_seqlens=None, rows=None):
    """o, final state, then gradients for cotangents of ones and of the numbers of a draw."""
    backend, (call, _) = BACKENDS[which.backend], RECURRENCES[name].map(**arguments)
    half = call.x.element_size() == 2
    # room for a state every 8 steps, which no plan passes
    lines = call.x.shape[0] * call.x.shape[1] // 8 + call.x.shape[0] + 9
    entries = torch.full((lines, call.x.shape[2]), torch.nan, device=call.x.device) if half else None
    o, final = backend.forward(which, call, cu_seqlens, entries)
    grad_o, grad_final = cotangents(o, final)
    grads = backend.backward(which, call, cu_seqlens, None if half else o, grad_o, grad_final, entries)
    return [o, final, *(x for x in grads if x is not None)]


def layouts_and_neighbours(name, dtype, which, packed, channels, device="cpu"):
    """Views are as good as copies, and no NaN leaves its sequence: bit for bit."""
    backend, length = BACKENDS[which.backend], packed[-1]

    def run_with(cu_seqlens):
        def passes(call, grad_o, grad_state):
            half = call.x.element_size() == 2
            lines = length // 8 + len(packed) + 9
            entries = torch.full((lines, channels), torch.nan, device=device) if half else None
            o, final = backend.forward(which, call, cu_seqlens, entries)
            grads = backend.backward(which, call, cu_seqlens, None if half else o, grad_o, grad_state, entries)
            names = ("o", "state", "da", "dx", "dtheta", "dstate")
            return {key: x for key, x in zip(names, (o, final, *grads), strict=True) if x is not None}

        return passes

    dtype = getattr(torch, dtype)
    call, _ = RECURRENCES[name].map(**example(name, dtype, length, packed, channels=channels, device=device))
    grad_o, grad_state = (x for x in cotangents(call.x, call.initial_state))
    one = call._replace(initial_state=call.initial_state[:1])
    limit = LIMITS[dtype] if device == "cuda" and which.backend == "triton" else 0.0
    assert_views_are_alike(run_with(None), one, grad_state[:1], limit)
    offsets = torch.tensor(packed, device=device)
    assert_nan_stays(run_with(offsets), call, packed, 1, (grad_o, grad_state))


def cotangents(o, final):
    draw = Draw(7, torch.float64)
    return draw.normal(*o.shape).to(o), draw.normal(*final.shape).to(final)


def exact(name, arguments, cu_seqlens=None):
    """The same from the oracle in float64."""
    leaves = {key: x.detach().double().requires_grad_() for key, x in arguments.items()}
    o, final = oracle(RECURRENCES[name], leaves, cu_seqlens)
    given = [g.double() for g in cotangents(o, final)]
    names = [key for key in ("a", "g", "x", "theta", "initial_state") if key in leaves]
    return [o, final, *torch.autograd.grad((o, final), [leaves[key] for key in names], given)]


def check(name, dtype, length, which, packed=None, batch=2, channels=18, device="cpu", forgets=True):
    dtype = getattr(torch, dtype)
    arguments = example(name, dtype, length, packed, batch, channels, device, forgets)
    # offsets need not be contiguous
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    got, right = run(name, arguments, which, cu_seqlens), exact(name, arguments, cu_seqlens)
    errors = [relative_error(x.double(), y) for x, y in zip(got, right, strict=True)]
    assert all(error <= LIMITS[dtype] for error in errors), (name, dtype, length, str(which), packed, errors)
    return errors


def interpreted():
    """Each kernel: both histories, ragged ends, packed sequences, pieces. The interpreter walks a scan in Python."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    small = {"block": 4, "segments": 2}
    for name in ("rglru", "hgrn", "rotlru"):
        print(name, check(name, "float32", 7, plan(**small), batch=1, channels=6))
        print(name, check(name, "float16", 7, plan(**small), [0, 0, 3, 7, 7], channels=4))
        # three pieces of two tiles: what the one in the middle does to a state counts, small as its product is
        print(name, check(name, "float32", 20, plan(**small, piece=8), batch=1, channels=4, forgets=False))
        # whole tiles and whole pieces, and sequences that end with a tile
        check(name, "float16", 8, plan(**small, piece=4), batch=1, channels=4)
        check(name, "float16", 12, plan(**small), [0, 4, 12], channels=4)
        layouts_and_neighbours(name, "float32" if name == "hgrn" else "float16", plan(**small), [0, 3, 8, 11], 4)


__all__ = ["cast", "check", "interpreted", "plan", "values_and_grads"]
