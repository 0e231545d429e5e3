"""Run in a child under Triton's interpreter: the dense kernels in Triton against the float64 oracle."""

import torch

from holdfast.kernels.dense.triton import backend as triton_loop
from holdfast.kernels.dense.weight_grad import select as weight_grad
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes, cell
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.dense import recurrence
from holdfast.recurrences.oracle_dense import dense_steps
from parity import relative_error


@cell(states=("h", "c", "d"), gates=("a", "b", "k", "l", "m"), input=("a", "k", "l"), recurrent=("m", "b", "a"))
def own(s, g):
    c = torch.sigmoid(g.a) * s.c + torch.tanh(g.k + s.h) * torch.sigmoid(g.b)
    return {"h": torch.nn.functional.softsign(c) * torch.sigmoid(g.m), "c": c, "d": 0.5 * s.d + g.l * g.m}


def product(dg, h, initial, reset):
    start = torch.zeros_like(h[:, 0]) if initial is None else initial.to(h.dtype)
    before = torch.cat([start[:, None], h[:, :-1]], 1)
    if reset is not None:
        before = before.masked_fill(reset[:, :, None, None], 0)
    return torch.einsum("btghi,bthj->ghij", dg.double(), before.double()).float().contiguous()[None]


def check(name, B, T, H, D, **options):
    """options: of the call; reset and without, the arguments that are left out, besides."""
    weight_grad.partial_weight_grads = product
    definition = recurrence(own) if name == "own" else RECURRENCES[name]
    arguments = definition.example(Draw(0, torch.float16), Sizes(B=B, T=T, H=H, D=D))
    for left_out in options.pop("without", ()):
        del arguments[left_out]
    which = own if name == "own" else definition.map(**arguments)[0].cell
    torch.manual_seed(0)
    reset = torch.rand(B, T) < 0.3 if options.pop("reset", False) else None
    exact = {k: v.double().requires_grad_() for k, v in arguments.items()}
    h, last = dense_steps(DenseCall(which, **exact, reset=reset, **options))
    grad_h, grad_last = torch.randn_like(h).half(), torch.randn_like(last).float()
    right = torch.autograd.grad([h, last], list(exact.values()), [grad_h.double(), grad_last.double()])
    right = dict(zip(exact, right, strict=True))
    call = DenseCall(which, **arguments, reset=reset, **options)
    block = max(16, 1 << (D - 1).bit_length())
    backend, plan = triton_loop.TritonLoop(), Plan("triton", (("block", block), ("warps", 4)))
    got_h, got_last, states, gates = backend.forward(plan, call, None, True)
    assert torch.equal(got_h, backend.forward(plan, call, None, False)[0])
    dx, dR, db, dinitial = backend.backward(plan, call, None, got_h, states, gates, grad_h, grad_last)
    got = {"x": dx, "R": dR, "b": db, "initial_state": dinitial}
    errors = {
        "h": relative_error(got_h.double(), h.detach()),
        "final": relative_error(got_last.double(), last.detach()),
    }
    errors |= {k: relative_error(got[k].double(), v) for k, v in right.items()}
    assert max(errors.values()) <= 3e-3, errors


def interpreted():
    for name in ("elman", "lstm", "gru", "slstm", "own"):
        check(name, B=3, T=5, H=2, D=16, reset=True)
    check("lstm", B=17, T=3, H=1, D=20)
    check("gru", B=2, T=1, H=1, D=40)
    check("lstm", B=2, T=4, H=1, D=16, recurrent_grad_clip=0.05)
    check("gru", B=2, T=4, H=1, D=16, cut_recurrent_grad=True)
    check("lstm", B=2, T=4, H=1, D=16, without=("b", "initial_state"))
