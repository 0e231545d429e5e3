"""States in slices, against the step loop in float64 of the whole call: interpreted and on a GPU."""

import torch

from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.mlstm.triton.row_dot import row_dot
from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.kernels.matrix.wide import Wide
from holdfast.planner import Plan
from holdfast.planner.models.matrix.wide import Cut
from kernels.matrix.delta_rule.triton import parity as delta_parity
from kernels.matrix.scalar_decay.triton import parity as single_pass_parity
from kernels.matrix.scalar_decay.triton.parity import LIMITS, moved, run
from kernels.matrix.vector_decay.triton import parity as gla_parity
from parity import relative_error

STEPWISE = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2


def errors(backend, plans, call, packed=None, device="cpu", ends=True):
    """name -> relative error to float64. ends: whether a gradient comes through the final state."""
    call = moved(call, device)
    cu_seqlens = torch.tensor(packed, device=device) if packed else None
    sequences = len(packed) - 1 if packed else call.v.shape[0]
    draw = torch.Generator().manual_seed(7)
    grad_o = torch.randn(call.v.shape, generator=draw).to(call.v)
    shape = (sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3] + (call.stabilizer is not None))
    grad_state = torch.randn(shape, generator=draw).to(device) if ends else None
    wide = (grad_o.double(), grad_state.double() if ends else None)
    right = run(Reference(), STEPWISE, moved(call, device, torch.float64), cu_seqlens, wide)
    got = run(backend, plans, call, cu_seqlens, (grad_o, grad_state))
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in right.items()}
    return {name: relative_error(got[name].double(), x) for name, x in right.items()}


def check(label, member, call, which, slices, packed=None, **options):
    """slices: of V."""
    planned = Cut(1, slices).planned(which)
    found = errors(Wide(member), (planned,) * 2, call, packed, **options)
    limit = LIMITS[call.v.dtype]
    assert all(error <= limit for error in found.values()), (label, found)
    print(label, {name: f"{error:.0e}" for name, error in found.items()})


def in_short():
    """Of each kind one call, the smallest that says something."""
    of, plan = single_pass_parity.example, single_pass_parity.plan(keys=64, columns=16)
    ends = (0, 0, 5, 17)
    call = of(T=17, H=2, Hq=1, K=16, V=29, norm=True, packed=ends)
    check("normalised, grouped, packed, filled up", TritonSinglePass(), call, plan, 2, packed=ends)
    print("in short")


def products():
    """mlstm/triton/row_dot.py's, of views."""
    do, o = torch.randn(2, 21, 3, 80).bfloat16()[..., 8:48], torch.randn(2, 3, 21, 40).bfloat16().transpose(1, 2)
    found = row_dot(do, o)
    assert relative_error(found, (do.double() * o.double()).sum(-1).transpose(1, 2)) <= 1e-6
    print("products", found.shape)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    of, plan = single_pass_parity.example, single_pass_parity.plan(keys=64, columns=16)
    ends = (0, 0, 5, 17)
    sweep, delta, gla = TritonSinglePass(), TritonDelta(), TritonGLA()
    check("sweep", sweep, of(T=21, K=48, V=80), plan, 5)
    check("sweep, grouped and packed", sweep, of(T=17, H=4, K=20, V=32, packed=ends), plan, 2, packed=ends)
    check("sweep, filled up", sweep, of(T=5, K=16, V=19), plan, 2)
    check("sweep, nothing but q, k, v", sweep, of(T=5, g=None, beta=False, state=False, V=24), plan, 3, ends=False)
    check("normalised", sweep, of(T=21, H=2, Hq=1, K=20, V=48, norm=True), plan, 3)
    check("normalised, packed, filled up", sweep, of(T=17, norm=True, V=21, packed=ends), plan, 2, packed=ends)
    check("normalised, without states", sweep, of(T=5, norm=True, state=False), plan, 2, ends=False)
    of, plan = delta_parity.example, delta_parity.plan()
    check("delta", delta, of(T=21, K=48, V=80), plan, 5)
    check("delta, grouped and packed", delta, of(T=17, H=4, K=20, V=32, packed=ends), plan, 2, packed=ends)
    check("delta, filled up", delta, of(T=5, V=19), plan, 2)
    check("delta, gradients in two parts", delta, of(T=21, H=1, Hq=1, K=136, V=24), delta_parity.plan(columns=32), 1)
    of, plan = gla_parity.example, gla_parity.plan(columns=16)
    check("gla", gla, of(T=70, K=48, V=80), plan, 5)
    check("gla, grouped and packed", gla, of(T=17, H=4, Hq=2, K=20, V=32, packed=ends), plan, 2, packed=ends)
    check("one token", gla, of(T=1), plan, 2)
    check("no token", gla, of(T=0), plan, 2)
