"""The Triton selective scan, called as its backend is, against the oracle: in the interpreter and on a GPU."""

import torch

from holdfast.kernels.selective.triton.backend import TritonSelective
from holdfast.ops.selective import ENTRY_STEPS
from holdfast.planner import Plan
from holdfast.recurrences import Draw, Sizes, oracle
from holdfast.recurrences.definition import SelectiveCall
from holdfast.recurrences.mamba1 import MAMBA1
from layouts import assert_nan_stays, assert_views_are_alike
from parity import cast, relative_error

# that of `verify` in float32; of half precision the rounding of outputs, twice over
LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
NAMES = SelectiveCall._fields[:9]


def plan(chunk=4, block_d=4, block_n=2, warps=1):
    return Plan("triton", tuple(locals().items()))


def example(dtype, length, packed=None, channels=6, numbers=3, groups=None, left_out=(), batch=2, device="cpu"):
    """Arguments by name; packed: offsets. Some decays leave nothing, some all."""
    draw = Draw(0, dtype, device)
    batch = 1 if packed else batch
    arguments = MAMBA1.example(draw, Sizes(B=batch, T=length, D=channels, N=numbers))
    arguments["A"][0] *= 200
    arguments["A"][-1] = 0
    if groups:
        arguments |= {name: draw.normal(batch, length, groups, numbers) for name in "BC"}
    if packed:
        arguments["initial_state"] = Draw(3, dtype, device).state(len(packed) - 1, channels, numbers)
    return {name: x for name, x in arguments.items() if name not in left_out}


def entries_for(call, rows):
    steps = call.x.shape[0] * call.x.shape[1] // min(4, ENTRY_STEPS) + 2 * rows
    return torch.full((steps, *reversed(call.A.shape)), torch.nan, device=call.x.device)


def passes(call, which, cu_seqlens, grad_y, grad_final):
    """Results of both passes, by name; those of no gradient are the same without what is kept for it."""
    backend, rows = TritonSelective(), call.x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    entries = entries_for(call, rows)
    y, final = backend.forward(which, call, cu_seqlens, entries)
    again = backend.forward(which, call, cu_seqlens)
    assert all(map(torch.equal, (y, final), again)) or y.isnan().any()
    grads = backend.backward(which, call, cu_seqlens, entries, grad_y, grad_final)
    found = dict(zip(NAMES, grads, strict=True))
    given = {name: found[name] for name in NAMES if getattr(call, name) is not None}
    assert all(x is None or name in (*given, "initial_state") for name, x in found.items())
    return {"o": y, "state": final} | {f"d{name}": x for name, x in given.items()}


def cotangents(y, final):
    """So small that dA, a sum over all tokens, is a number of float16."""
    draw = Draw(7, torch.float64)
    return draw.normal(*y.shape).to(y) / 16, draw.normal(*final.shape).to(final) / 16


def exact(arguments, softplus, cu_seqlens=None):
    """The same from the oracle in float64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in arguments.items()}
    y, final = oracle(MAMBA1, leaves | {"dt_softplus": softplus}, cu_seqlens)
    given = [g.double() for g in cotangents(y, final)]
    names = [name for name in NAMES if name in leaves]
    grads = torch.autograd.grad((y, final), [leaves[name] for name in names], given)
    return {"o": y, "state": final} | {f"d{name}": x for name, x in zip(names, grads, strict=True)}


def check_forward(dtype, length, which, packed=None, device="cpu", **sizes):
    """`check` of a plan that the forward pass alone has."""
    dtype = getattr(torch, dtype)
    arguments = example(dtype, length, packed, device=device, **sizes)
    cu_seqlens = torch.tensor(packed, device=device) if packed else None
    right = exact(arguments, True, cu_seqlens)
    call, _ = MAMBA1.map(**arguments, dt_softplus=True)
    y, final = TritonSelective().forward(which, call, cu_seqlens)
    for name, x in (("o", y), ("state", final)):
        assert relative_error(x.double(), right[name]) <= LIMITS[dtype], name


def check(dtype, length, which, softplus=True, packed=None, device="cpu", dt_dtype=None, **sizes):
    dtype = getattr(torch, dtype)
    arguments = example(dtype, length, packed, device=device, **sizes)
    if dt_dtype is not None:
        arguments["dt"] = arguments["dt"].to(dt_dtype)
    # offsets need not be contiguous
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    call, _ = MAMBA1.map(**arguments, dt_softplus=softplus)
    right = exact(arguments, softplus, cu_seqlens)
    grad_y, grad_final = cotangents(right["o"].to(dtype), right["state"].float())
    got = passes(call, which, cu_seqlens, grad_y, grad_final)
    assert got.keys() == right.keys()
    errors = {name: relative_error(x.double().reshape(right[name].shape), right[name]) for name, x in got.items()}
    assert all(error <= LIMITS[dtype] for error in errors.values()), (dtype, length, str(which), packed, errors)
    return errors


def layouts_and_neighbours(dtype, which, packed):
    """Views are as good as copies, and no NaN leaves its sequence: bit for bit."""
    call, _ = MAMBA1.map(**example(getattr(torch, dtype), packed[-1], packed), dt_softplus=True)
    grad_o, grad_state = cotangents(call.x, call.initial_state)

    def run(call, grad_o, grad_state):
        return passes(call, which, None, grad_o, grad_state)

    assert_views_are_alike(run, call._replace(initial_state=call.initial_state[:1]), grad_state[:1])
    # what all sequences share is not spoilt, and its gradients are sums over all of them
    shared = {name: getattr(call, name) for name in ("A", "D", "dt_bias")}

    def run_packed(call, grad_o, grad_state):
        found = passes(call._replace(**shared), which, torch.tensor(packed), grad_o, grad_state)
        names = {"dinitial_state": "dstate"} | {f"d{name}": None for name in shared}
        return {names.get(name, name): x for name, x in found.items() if names.get(name, name) is not None}

    assert_nan_stays(run_packed, call._replace(D=None, dt_bias=None), packed, 1, (grad_o, grad_state))


def interpreted():
    """Ragged ends, packed sequences, groups. The interpreter walks a scan in Python."""
    print(check("float32", 9, plan()))
    print(check("float32", 8, plan(), softplus=False, groups=2, batch=1))
    print(check("float16", 9, plan(), packed=[0, 0, 3, 8, 9, 9], channels=4, dt_dtype=torch.float32))


def interpreted_further():
    """What may be left out, and a state of which the last program has a part."""
    left_out = ("D", "z", "dt_bias", "initial_state")
    print(check("bfloat16", 5, plan(), left_out=left_out, batch=1, dt_dtype=torch.float64))
    print(check("float32", 3, plan(chunk=8, block_d=8, block_n=4), numbers=17, batch=1, channels=5))


def interpreted_layouts():
    layouts_and_neighbours("float32", plan(), [0, 3, 8, 9])


__all__ = ["cast", "check", "check_forward", "interpreted", "interpreted_further", "interpreted_layouts", "plan"]
