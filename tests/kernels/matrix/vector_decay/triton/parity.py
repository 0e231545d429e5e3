"""The vector-decay kernels, called as their backend is, against the step loop in float64: interpreted and on a GPU."""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.ops import matrix
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall
from kernels.matrix.scalar_decay.triton.parity import layouts_and_neighbours, moved, run
from parity import relative_error

# of `check` in float32; of half precision, twice the rounding of an output, as products of rounded operands have
LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def plan(columns=32, warps=4, stages=1):
    """One plan for both passes."""
    values = {"columns": columns, "warps": warps, "stages": stages}
    return Plan("triton", tuple(values.items()))


def example(
    B=1, T=70, H=1, Hq=1, K=16, V=32, dtype=torch.float32, g="mild", beta=True, state=True, packed=None,
    decays=torch.float32,
) -> MatrixCall:  # fmt: skip
    """Random arguments on the CPU.

    g: "mild", "none" (0), "weak", "rapid" (-6), "strong" (-50), "channels" (one channel in four -50, one 0, the others
    mild) or "resets" (some tokens' channels -inf, some -50).
    """
    draw = torch.Generator().manual_seed(T + K)
    sequences = len(packed) - 1 if packed else B

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    def channels() -> Tensor:
        kind = torch.arange(K) % 4
        return torch.where(kind == 0, -50.0, torch.where(kind == 1, 0.0, -uniform(B, T, H, K)))

    makers: dict[str, Callable[[], Tensor]] = {
        "mild": lambda: -uniform(B, T, H, K),
        "weak": lambda: -0.02 * uniform(B, T, H, K),
        "none": lambda: torch.zeros(B, T, H, K),
        "rapid": lambda: torch.full((B, T, H, K), -6.0),
        "strong": lambda: torch.full((B, T, H, K), -50.0),
        "channels": channels,
        "resets": lambda: torch.where(
            uniform(B, T, H, K) < 0.1,
            -torch.inf,
            torch.where(uniform(B, T, H, K) < 0.1, -50.0, -0.01 * uniform(B, T, H, K)),
        ),
    }
    return MatrixCall(
        normal(B, T, Hq, K).to(dtype),
        (normal(B, T, Hq, K) * K**-0.5).to(dtype),
        normal(B, T, H, V).to(dtype),
        makers[g]().to(decays),
        uniform(B, T, H) if beta else None,
        None,
        normal(sequences, H, K, V) if state else None,
        scale=K**-0.5,
    )


def errors(call, plans, packed=None, device="cpu", exact=Reference, ends=True, kernels=None):
    """name -> (error of the kernels, error of the PyTorch path in the same dtype), relative to float64.

    ends: whether a gradient comes through the final state. kernels: their backend, Triton's if None.
    """
    call = moved(call, device)
    # offsets may be a view
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    sequences = len(packed) - 1 if packed else call.v.shape[0]
    draw = torch.Generator().manual_seed(7)
    shape = (sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3])
    grad_o = torch.randn(call.v.shape, generator=draw).to(call.v)
    grad_state = torch.randn(shape, generator=draw).to(device) if ends else None
    wide = (grad_o.double(), grad_state.double() if ends else None)
    stepwise = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2
    segments = (Plan("chunked", (("chunk", 64), ("segment", 1024))),) * 2
    right = run(
        exact(), stepwise if exact is Reference else segments, moved(call, device, torch.float64), cu_seqlens, wide
    )
    same = run(Chunked(), segments, call, cu_seqlens, (grad_o, grad_state))
    got = run(kernels or TritonGLA(), plans, call, cu_seqlens, (grad_o, grad_state))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same.items()}
    return {
        name: (relative_error(got[name].double(), x), relative_error(same[name].double(), x))
        for name, x in right.items()
    }


def planned(kernels: TritonGLA | HopperGLA, call: MatrixCall, packed=None) -> tuple[Plan, Plan]:
    """What the planner has both passes of a backend run with on the present GPU."""
    cu_seqlens = torch.tensor([0, 1]) if packed else None
    device = describe(torch.device("cuda", 0))
    problem = matrix.problem("gla", call, cu_seqlens, True)
    forward, backward = (kernels.candidates(problem, device, way)[0].plan for way in ("forward", "backward"))
    return forward, backward


def on_gpu(which: dict, packed, ends: bool, backend: str = "triton") -> None:
    """Prints `errors` of an example with the planner's plans, in a process of its own."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    call = example(packed=packed, **which)
    kernels = {"triton": TritonGLA, "hopper": HopperGLA}[backend]()
    plans = planned(kernels, call, packed)
    print(json.dumps(errors(call, plans, packed, device="cuda", exact=Chunked, ends=ends, kernels=kernels)))


def check(label, call, which, packed=None, limit=None, **options):
    found = errors(call, (which, which), packed, **options)
    limit = limit or LIMITS[call.v.dtype]
    assert all(mine <= limit for mine, _ in found.values()), (label, str(which), found)
    print(label, {name: f"{mine:.0e}" for name, (mine, _) in found.items()})


def decays_next_to_one():
    """Multiplied, they lose what is beyond their spacing: 2.6e-6 here, and as many times more as tokens."""
    call = example(T=1024, K=32, state=False, beta=False)
    draw = torch.Generator().manual_seed(1)
    call = call._replace(g=-2e-4 * torch.rand(call.g.shape, generator=draw))
    segments = Plan("chunked", (("chunk", 64), ("segment", 1024)))
    right = Chunked().forward(segments, moved(call, "cpu", torch.float64), None)
    found = [relative_error(x.double(), y) for x, y in zip(TritonGLA().forward(plan(), call, None), right, strict=True)]
    print("weak", found)
    assert max(found) <= 1e-6, found


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check("split columns, a ragged tail", example(), plan(columns=16))
    check("no strength, no states", example(beta=False, state=False), plan(), ends=False)
    check("grouped, widths of no tile", example(H=2, T=17, K=20, V=24), plan())
    check("two pieces of keys", example(T=66, K=72, V=16), plan(columns=16))
    check("three chunks", example(T=130, g="weak"), plan())
    check("packed", example(T=80, packed=(0, 0, 66, 80)), plan(), packed=(0, 0, 66, 80))
    check("resets", example(g="resets"), plan())
    check("channels", example(g="channels"), plan())
    check("decays of fifty", example(g="strong", state=False), plan(), ends=False)
    check("half precision", example(dtype=torch.float16), plan())
    # the gradients of the states lie in the memory of dg
    check("whole chunks", example(T=128, K=64, V=24, dtype=torch.float16), plan())
    check("decays in half precision", example(decays=torch.bfloat16), plan(), limit=4e-3)
    layouts_and_neighbours(example(T=90, V=24), plan(), TritonGLA(), (0, 20, 50, 90))
    check("one token", example(T=1), plan())
    check("no token", example(T=0), plan())
