"""The delta rule in Triton, called as its backend is, against the step loop in float64: interpreted and on a GPU."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall
from kernels.matrix.scalar_decay.triton.parity import LIMITS, layouts_and_neighbours, moved, run
from parity import relative_error

REFERENCE = Plan("reference", (("segment", 64), ("chunk", 64)))


def plan(chunk=16, columns=16, warps=4, stages=1, grad_columns=16, grad_warps=4, windows=1, prepare_warps=4):
    """One plan for both passes."""
    values = {"chunk": chunk, "columns": columns, "warps": warps, "stages": stages, "reverse_stages": stages}
    values |= {"grad_columns": grad_columns, "grad_warps": grad_warps, "windows": windows}
    return Plan("triton", tuple((values | {"prepare_warps": prepare_warps}).items()))


def example(
    B=1, T=21, H=2, Hq=2, K=16, V=32, dtype=torch.float32, g="mild", beta="mild", state=True, packed=None
) -> MatrixCall:
    """Random arguments on the CPU, keys of length 1.

    g: None, or "mild", "none" (0), "strong" (-50) or "resets" (some -inf, some -50). beta: None, or "mild" or "two": up
    to 1 or 2, and 0 now and then.
    """
    draw = torch.Generator().manual_seed(T + K)
    sequences = len(packed) - 1 if packed else B

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    decays: dict[str, Callable[[], Tensor]] = {
        "mild": lambda: -uniform(B, T, H),
        "none": lambda: torch.zeros(B, T, H),
        "strong": lambda: torch.full((B, T, H), -50.0),
        "resets": lambda: torch.where(
            uniform(B, T, H) < 0.2, -torch.inf, torch.where(uniform(B, T, H) < 0.2, -50.0, -0.01 * uniform(B, T, H))
        ),
    }
    strength = {"mild": 1.0, "two": 2.0}
    return MatrixCall(
        normal(B, T, Hq, K).to(dtype),
        F.normalize(normal(B, T, Hq, K), dim=-1).to(dtype),
        normal(B, T, H, V).to(dtype),
        decays[g]() if g else None,
        strength[beta] * uniform(B, T, H) * (uniform(B, T, H) > 0.1) if beta else None,
        None,
        normal(sequences, H, K, V) if state else None,
        scale=K**-0.5,
        eps=1e-6,
        delta=True,
    )


def correlated(T, B=1, H=2, K=128, V=128, dtype=torch.bfloat16) -> MatrixCall:
    """Keys with a common direction four times their noise, beta .99, almost no decay: what breaks an inverse."""
    draw = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    k = F.normalize(normal(B, T, H, K) + 4 * normal(B, 1, H, K), dim=-1)
    g = -1e-4 * torch.rand(B, T, H, generator=draw)
    beta = torch.full((B, T, H), 0.99)
    q, v = normal(B, T, H, K), normal(B, T, H, V)
    return MatrixCall(q.to(dtype), k.to(dtype), v.to(dtype), g, beta, scale=K**-0.5, delta=True)


def errors(call, plans, packed=None, device="cpu", exact=Reference, ends=True, exact_inverse=False, backend=None):
    """name -> (error of the kernel, error of the PyTorch path in the same dtype), relative to float64.

    ends: whether a gradient comes through the final state. exact_inverse: beside the error of with_exact_inverse.
    backend: whose kernels, Triton's if None.
    """
    call = moved(call, device)
    # offsets may be a view
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    sequences = len(packed) - 1 if packed else call.v.shape[0]
    draw = torch.Generator().manual_seed(7)
    grad_o = torch.randn(call.v.shape, generator=draw).to(call.v)
    shape = (sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3])
    grad_state = torch.randn(shape, generator=draw).to(device) if ends else None
    wide = (grad_o.double(), grad_state.double() if ends else None)
    stepwise = (REFERENCE,) * 2
    segments = (Plan("chunked", (("chunk", 64), ("segment", 1024))),) * 2
    right = run(
        exact(), stepwise if exact is Reference else segments, moved(call, device, torch.float64), cu_seqlens, wide
    )
    if exact_inverse:
        same = dict(zip(right, gradients_with_exact_inverse(call, (grad_o, grad_state)), strict=True))
    else:
        same = run(Chunked(), segments, call, cu_seqlens, (grad_o, grad_state))
    got = run(backend or TritonDelta(), plans, call, cu_seqlens, (grad_o, grad_state))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same.items()}
    return {
        name: (relative_error(got[name].double(), x), relative_error(same[name].double(), x))
        for name, x in right.items()
    }


def check(label, call, which, packed=None, **options):
    found = errors(call, (which, which), packed, **options)
    limit = LIMITS[call.v.dtype]
    assert all(mine <= limit for mine, _ in found.values()), (label, str(which), found)
    print(label, {name: f"{mine:.0e}" for name, (mine, _) in found.items()})


def small_heads():
    """Heads so small that the rounding of each operand shows; keys alike and no decay to take it away."""
    for keys, values in ((8, 8), (16, 64)):
        call = correlated(100, K=keys, V=values, dtype=torch.float16)._replace(g=None)
        call = call._replace(initial_state=torch.zeros(1, 2, keys, values))
        found = errors(call, (plan(chunk=32),) * 2)
        print({name: f"{mine:.0e}" for name, (mine, _) in found.items()})
        assert max(found[name][0] for name in ("state", "dstate")) <= 2e-5, found
        # rounded once, at the end
        assert max(found[name][0] for name in ("o", "dq", "dk", "dv")) <= 2.0**-11, found


def sums_of_dg_in_float32():
    """The sum of dg over tokens, a rate's gradient, of the root of the sum of squares of its terms."""
    for T in (96, 98):
        call = example(T=T, H=4, Hq=4, K=32, V=32, beta="two")
        call = call._replace(g=8 * call.g)
        do = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(7))
        which = plan(chunk=32, columns=32)
        right = run(Reference(), (REFERENCE,) * 2, moved(call, "cpu", torch.float64), None, (do.double(), None))["dg"]
        dg = run(TritonDelta(), (which, which), call, None, (do, None))["dg"].double()
        found = ((dg - right).sum(1) / right.norm(dim=1)).abs().max().item()
        print("sums", T, f"{found:.1e}")
        assert found <= 7e-7, (T, found)


def error_of_dg_through_states(call, which, backend, packed=None) -> float:
    """The largest relative error of dg where nothing is read or written: a sequence's decay times <S, dS'>."""
    call = call._replace(beta=torch.zeros_like(call.beta))
    cu_seqlens = torch.tensor(packed) if packed else None
    grad_state = torch.randn(call.initial_state.shape, generator=torch.Generator().manual_seed(7))
    dg = backend.backward(which, call, cu_seqlens, None, grad_state)[0][3].double()
    products = (call.initial_state.double() * grad_state).sum((-2, -1))
    right = []
    for n, (begin, end) in enumerate(pairwise(packed) if packed else [(0, call.v.shape[1])] * call.v.shape[0]):
        row = slice(begin, end)
        decays = call.g[0 if packed else n, row].double()
        right.append((decays.sum(0).exp() * products[n]).expand(decays.shape))
    right = torch.cat(right)[None] if packed else torch.stack(right)
    return ((dg - right) / right).abs().max().item()


def sequences_of_one_chunk():
    """Rounded states leave 1e-3 of <S, dS'>, which may be all of dg."""
    packed = (0, 2, 2, 18)
    short = example(T=2, B=2, K=32, dtype=torch.float16)
    for call, which, offsets in (
        (short, plan(columns=32), None),
        # dq and dk in two programs, the second of which has 16 columns
        (example(T=16, K=144, V=24, dtype=torch.float16), plan(columns=32), None),
        (example(T=18, K=32, packed=packed, dtype=torch.float16), plan(columns=32), packed),
    ):
        error = error_of_dg_through_states(call, which, TritonDelta(), offsets)
        assert error <= 1e-5, (offsets, error)
        print(f"dg {error:.0e}")


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check("split columns, a ragged tail", example(T=37), plan())
    check("states in the gradients' memory, three windows", example(T=48, B=2), plan(columns=32, windows=3))
    check("windows of unequal length", example(T=67, H=1, Hq=1), plan(columns=32, windows=2))
    check("no decay, no strength, no states", example(g=None, beta=None, state=False), plan(columns=32), ends=False)
    check("grouped, widths of no tile", example(H=4, T=17, K=20, V=24), plan(columns=32, grad_columns=32))
    check("strength to 2, values wider than two chunks", example(T=32, V=48, beta="two"), plan())
    # of more than two blocks of columns the gradients' launch takes a loop
    check("values of three blocks, half of the last one", example(T=19, H=1, Hq=1, V=40), plan(columns=32))
    check("packed", example(T=45, packed=(0, 0, 5, 37, 37, 45)), plan(columns=32), packed=(0, 0, 5, 37, 37, 45))
    check("resets", example(g="resets"), plan(columns=32))
    check("grouped, states in their gradients' memory", example(H=4, T=32, dtype=torch.float16), plan())
    check("half precision", example(T=64, H=1, Hq=1, dtype=torch.float16), plan(chunk=32, columns=32))
    call = correlated(192, H=1, K=32, V=16, dtype=torch.float16)
    right, _ = Reference().forward(REFERENCE, moved(call, "cpu", torch.float64), None)
    o, _ = TritonDelta().forward(plan(chunk=64), call, None)
    mine, exact = (relative_error(x.double(), right) for x in (o, with_exact_inverse(call)[0]))
    assert mine <= 1.5 * exact, ("correlated keys", mine, exact)
    print(f"correlated keys {mine:.1e}, with an exact inverse {exact:.1e}")
    layouts_and_neighbours(example(T=20, V=24), plan(), TritonDelta())
    check("one token", example(T=1), plan(columns=32))
    check("no token", example(T=0), plan(columns=32))


def with_exact_inverse(call: MatrixCall, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """o and the final state as the kernels form them, differentiably: operands of products rounded alike, but each
    chunk's inverse solved in float64. Without a decay or on correlated keys, what rounded operands cost at least."""
    dtype = call.v.dtype
    rounded = lambda x: x.to(dtype).float()  # noqa: E731
    heads = call.v.shape[2]
    q, k, v = (x.float().repeat_interleave(heads // x.shape[2], 2).movedim(1, 2) for x in call[:3])
    ones = v.new_ones(*v.shape[:3])
    g = 0 * ones if call.g is None else call.g.movedim(1, 2)
    beta = (ones if call.beta is None else call.beta.movedim(1, 2))[..., None]
    state, outputs = call.initial_state, []
    if state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    for start in range(0, k.shape[2], chunk):
        at = slice(start, start + chunk)
        here, keys, queries = g[..., at].cumsum(-1), k[..., at, :], q[..., at, :]
        to_here, to_end = here.exp()[..., None], (here[..., -1:] - here).exp()[..., None]
        lower = torch.ones(here.shape[-1], here.shape[-1], dtype=torch.bool, device=k.device).tril()
        between = (here[..., :, None] - here[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        identity = torch.eye(here.shape[-1], dtype=torch.float64, device=k.device)
        m = identity + (beta[..., at, :] * (keys @ keys.mT) * between).double().tril(-1)
        inverse = torch.linalg.solve_triangular(m, identity.expand_as(m), upper=False).float()
        read = rounded(state)
        error = beta[..., at, :] * (v[..., at, :] - to_here * (keys @ read))
        u = error + rounded(inverse - identity.float()) @ rounded(error)
        p = rounded(call.scale * (queries @ keys.mT) * between)
        outputs.append(call.scale * to_here * (queries @ read) + p @ rounded(u))
        state = to_here[..., -1:, :] * state + keys.mT @ rounded(to_end * u)
    return torch.cat(outputs, 2).movedim(2, 1).to(dtype), state


def gradients_with_exact_inverse(call: MatrixCall, cotangents: tuple[Tensor, Tensor]) -> list[Tensor]:
    """with_exact_inverse, and the gradients of what was given, in the order of MatrixCall."""
    call = MatrixCall(*(None if x is None else x.detach().requires_grad_() for x in call[:7]), *call[7:])
    values = with_exact_inverse(call)
    return [*values, *torch.autograd.grad(values, [x for x in call[:7] if x is not None], cotangents)]
