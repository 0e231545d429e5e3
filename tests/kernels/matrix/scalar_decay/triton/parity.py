"""The Triton single pass, called as its backend is, against the step loop in float64: interpreted and on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall
from layouts import assert_nan_stays, assert_views_are_alike
from parity import relative_error

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dm", "dstate", "de")
# of `verify` in float32; of half precision, twice the rounding of an output, as products of rounded operands have
LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def plan(chunk=16, columns=16, keys=16, warps=4, stages=1, segments=1, keep=1):
    """One plan for both passes."""
    values = {"chunk": chunk, "columns": columns, "key_columns": keys, "value_columns": columns, "warps": warps}
    values |= {"stages": stages, "segments": segments, "keep": keep}
    return Plan("triton", tuple(values.items()))


def example(
    B=1, T=21, H=2, Hq=2, K=16, V=32, dtype=torch.float32, g="mild", beta=True, norm=False, state=True, packed=None
) -> MatrixCall:
    """Random arguments on the CPU. g: None or one of `decays`; 64 steps leave 2^-46 if "mild", 2^-9 if "moderate"."""
    draw = torch.Generator().manual_seed(T + K)
    sequences = len(packed) - 1 if packed else B

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    decays: dict[str, Callable[[], Tensor]] = {
        "mild": lambda: -uniform(B, T, H),
        "moderate": lambda: -0.2 * uniform(B, T, H),
        "none": lambda: torch.zeros(B, T, H),
        "strong": lambda: torch.full((B, T, H), -50.0),
        "resets": lambda: torch.where(
            uniform(B, T, H) < 0.2, -torch.inf, torch.where(uniform(B, T, H) < 0.2, -50.0, -0.01 * uniform(B, T, H))
        ),
    }
    return MatrixCall(
        normal(B, T, Hq, K).to(dtype),
        (normal(B, T, Hq, K) * K**-0.5).to(dtype),
        normal(B, T, H, V).to(dtype),
        decays[g]() if g else None,
        uniform(B, T, H) if beta else None,
        -(0.5 * uniform(B, T, H) + 0.01).log() if norm else None,
        normal(sequences, H, K, V + norm) if state else None,
        scale=K**-0.5,
        eps=1e-6,
    )


def apart(call: MatrixCall, packed=None) -> MatrixCall:
    """The call with floors of 0.5 and more that the rounding of a 16-bit normaliser does not pass.

    The gradient jumps where the two are equal, and grows without bound where both are near 0: rounding the initial
    state alone, all else in float64, then moves its gradient by 1.6e-2.
    """
    wide = moved(call, "cpu", torch.float64)
    floors = (-wide.stabilizer).exp() + 0.49
    ones = torch.ones_like(wide.v[..., :1])
    state = None if call.initial_state is None else wide.initial_state[..., -1:]
    plain = wide._replace(v=ones, stabilizer=None, initial_state=state)
    segments = Plan("chunked", (("chunk", 64), ("segment", 1024)))
    norm = Chunked().forward(segments, plain, torch.tensor(packed) if packed else None)[0][..., 0].abs()
    apart = torch.where((norm - floors).abs() < 0.05, norm + 0.1, floors)
    return call._replace(stabilizer=-apart.log().to(call.stabilizer.dtype))


def moved(call: MatrixCall, device: str, dtype: torch.dtype | None = None) -> MatrixCall:
    return MatrixCall(*(None if x is None else x.to(device, dtype or x.dtype) for x in call[:8]), *call[8:])


def run(backend, plans, call, cu_seqlens, cotangents):
    """o, final state, and the gradients of all that was given."""
    forward, backward = plans
    o, state, *kept = backend.forward(forward, call, cu_seqlens)
    grads, grad_state = backend.backward(backward, call, cu_seqlens, *cotangents, *((o, *kept) if kept else ()))
    grads = [*grads[:6], None if call.initial_state is None else grad_state, *(grads[6:] or [None])]
    return {name: x for name, x in zip(NAMES, [o, state, *grads], strict=True) if x is not None}


def errors(call, plans, packed=None, device="cpu", exact=Reference, ends=True):
    """name -> (error of the kernel, error of the PyTorch path in the same dtype), relative to float64.

    ends: whether a gradient comes through the final state.
    """
    call = moved(call, device)
    # offsets may be a view
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    sequences = len(packed) - 1 if packed else call.v.shape[0]
    draw = torch.Generator().manual_seed(7)
    shape = (sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3] + (call.stabilizer is not None))
    grad_o = torch.randn(call.v.shape, generator=draw).to(call.v)
    grad_state = torch.randn(shape, generator=draw).to(device) if ends else None
    wide = (grad_o.double(), grad_state.double() if ends else None)
    stepwise = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2
    segments = (Plan("chunked", (("chunk", 64), ("segment", 1024))),) * 2
    right = run(
        exact(), stepwise if exact is Reference else segments, moved(call, device, torch.float64), cu_seqlens, wide
    )
    same = run(Chunked(), segments, call, cu_seqlens, (grad_o, grad_state))
    got = run(TritonSinglePass(), plans, call, cu_seqlens, (grad_o, grad_state))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same.items()}
    return {
        name: (relative_error(got[name].double(), x), relative_error(same[name].double(), x))
        for name, x in right.items()
    }


def layouts_and_neighbours(call, which, backend=None, packed=(0, 5, 13, 20), device="cpu"):
    """Views are as good as copies, and no NaN leaves its sequence: bit for bit. call: of B = 1, packed[-1] tokens."""
    draw = torch.Generator().manual_seed(7)
    shape = (call.v.shape[2], call.k.shape[3], call.v.shape[3] + (call.stabilizer is not None))
    states = torch.randn(len(packed) - 1, *shape, generator=draw).to(device)
    grad_o = torch.randn(call.v.shape, generator=draw).to(call.v)

    def run_with(cu_seqlens):
        which_run = (which,) * 2 if isinstance(which, Plan) else which
        return lambda call, *cotangents: run(backend or TritonSinglePass(), which_run, call, cu_seqlens, cotangents)

    limit = LIMITS[call.v.dtype] if device == "cuda" else 0.0
    assert_views_are_alike(run_with(None), call._replace(initial_state=states[:1]), states[:1], limit)
    offsets = torch.tensor(packed, device=device)
    assert_nan_stays(run_with(offsets), call._replace(initial_state=states), packed, 1, (grad_o, states.flip(0)))


def check(label, call, which, packed=None, limit=None, **options):
    found = errors(call, (which, which), packed, **options)
    limit = limit or LIMITS[call.v.dtype]
    assert all(mine <= limit for mine, _ in found.values()), (label, str(which), found)
    print(label, {name: f"{mine:.0e}" for name, (mine, _) in found.items()})


def rate_of_long_steps():
    """The gradient of a rate, sum dg dt, where dt is long just where the decay exp(rate dt) leaves nothing.

    Its true terms are those of the few tokens whose decay leaves something; rounding in dg of all others drowns them.
    """
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        call = example(T=130, H=1, Hq=1, K=16, V=16, dtype=torch.float16)
        step = torch.randn(call.g.shape, generator=draw).sigmoid()
        step = torch.where(torch.rand(call.g.shape, generator=draw) < 0.2, 0.0, step)
        call = call._replace(g=-96 * step, beta=step)
        cotangents = torch.randn(call.v.shape, generator=draw).half(), None
        exact = run(
            Reference(),
            (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2,
            moved(call, "cpu", torch.float64),
            None,
            (cotangents[0].double(), None),
        )
        which = plan(chunk=64, keep=2)
        got = run(TritonSinglePass(), (which, which), call, None, cotangents)
        rate, right = ((x["dg"].double() * step).sum((0, 1)) for x in (got, exact))
        found = relative_error(rate, right)
        print("rate", seed, f"{found:.1e}")
        # rounding that went on to the tokens before made it 0.24 and 4.3 for two of these draws
        assert found <= 5e-2, (seed, rate, right)


def dg_of_long_steps_in_float32():
    """dg of tokens whose decay is e^-13, among others of hardly any: 1e-6 of theirs, and not their rounding."""
    for T in (30, 130):
        draw = torch.Generator().manual_seed(T)
        call = example(T=T, H=1, Hq=1, K=16, V=16)
        far = torch.rand(call.g.shape, generator=draw) < 0.5
        call = call._replace(g=torch.where(far, -13.0, call.g / 16))
        do = torch.randn(call.v.shape, generator=draw)
        which = plan(chunk=32, keep=2)
        stepwise = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2
        right = run(Reference(), stepwise, moved(call, "cpu", torch.float64), None, (do.double(), None))["dg"]
        dg = run(TritonSinglePass(), (which, which), call, None, (do, None))["dg"].double()
        found = relative_error(dg[far], right[far])
        print("far", T, f"{found:.1e}")
        # 0.1 and more where pairs that pass a token were a difference of sums
        assert found <= 1e-5, (T, found)


def sums_of_dg_in_float32():
    """The sum of dg over tokens, a constant decay's gradient, of the root of the sum of squares of its terms."""
    for T in (130, 132):
        call = example(T=T, K=32, V=32)
        do = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(7))
        which = plan(chunk=32, columns=32, keys=32, keep=2)
        stepwise = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2
        right = run(Reference(), stepwise, moved(call, "cpu", torch.float64), None, (do.double(), None))["dg"]
        dg = run(TritonSinglePass(), (which, which), call, None, (do, None))["dg"].double()
        found = ((dg - right).sum(1) / right.norm(dim=1)).abs().max().item()
        print("sums", T, f"{found:.1e}")
        assert found <= 3e-6, (T, found)


def what_passes_the_last_chunk(device="cpu", dtype=torch.float16, width=16):
    """dg of a gradient through the final state alone, where the last chunk leaves e^-7 of the state before it."""
    for T, keep in ((65, 2), (130, 1), (63, 2), (66, 1)):
        call = example(T=T, H=2, Hq=1, K=width, V=width, dtype=dtype)
        last = slice(-(T % 64), None)
        call.g[:, last] = -7.0 / (T % 64)
        call = moved(call, device)
        draw = torch.Generator().manual_seed(1)
        grad_state = torch.randn(call.initial_state.shape, generator=draw).to(device)
        cotangents = torch.zeros_like(call.v), grad_state
        which = plan(chunk=64, keep=keep, keys=width, columns=width)
        segments = (Plan("chunked", (("chunk", 64), ("segment", 1024))),) * 2
        wide = moved(call, device, torch.float64)
        exact = run(Chunked(), segments, wide, None, tuple(x.double() for x in cotangents))
        got = run(TritonSinglePass(), (which, which), call, None, cotangents)
        found = relative_error(got["dg"][:, last].double(), exact["dg"][:, last])
        print("passes", T, f"{found:.1e}")
        assert found <= 3e-3, (T, found)


def dg_of_one_chunk():
    """dg where no sequence is longer than a chunk: mostly what is read of states, which are not rounded then."""
    for packed in (None, (0, 31), (0, 10, 10, 31)):
        call = example(T=31, Hq=1, K=32, V=32, dtype=torch.float16, packed=packed)
        draw = torch.Generator().manual_seed(1)
        do = torch.randn(call.v.shape, generator=draw).half()
        grad_state = torch.randn(call.initial_state.shape, generator=draw)
        cu_seqlens = torch.tensor(packed) if packed else None
        stepwise = (Plan("reference", (("segment", 64), ("chunk", 64))),) * 2
        wide = moved(call, "cpu", torch.float64)
        right = run(Reference(), stepwise, wide, cu_seqlens, (do.double(), grad_state.double()))["dg"]
        which = plan(chunk=32, columns=32, keep=2)
        dg = run(TritonSinglePass(), (which, which), call, cu_seqlens, (do, grad_state))["dg"].double()
        found = relative_error(dg, right)
        print("one chunk", packed, f"{found:.1e}")
        # 3e-4 of rounded states
        assert found <= 2e-6, (packed, found)


def normaliser_that_cancels(backend=None, which=None, K=16, V=32):
    """n . q of 1e-3 of its terms, at the last token of a chunk that begins with six decays of e^-100, and behind it."""
    draw = torch.Generator().manual_seed(3)
    call = example(T=65, H=1, Hq=1, K=K, V=V, dtype=torch.float16, norm=True, state=False, g="moderate")
    call.g[:, 2:8] = -100.0
    stabilizer = torch.full_like(call.stabilizer, 20.0)
    for token in (63, 64):
        decays = call.g[0, : token + 1, 0].double()
        weights = (decays.sum() - decays.cumsum(0)).exp() * call.beta[0, : token + 1, 0]
        n = weights @ call.k[0, : token + 1, 0].double()
        queries = torch.randn(1000, call.q.shape[3], generator=draw).half()
        call.q[0, token, 0] = queries[(queries.double() @ n).abs().argmin()]
    call = call._replace(stabilizer=stabilizer)
    segments = Plan("chunked", (("chunk", 64), ("segment", 1024)))
    right, _ = Chunked().forward(segments, moved(call, "cpu", torch.float64), None)
    o = (backend or TritonSinglePass()).forward(which or plan(chunk=64, columns=32), call, None)[0]
    for token in (63, 64):
        found = relative_error(o[:, token].double(), right[:, token])
        print("cancels", token, f"{found:.1e}")
        assert found <= 1e-3, (token, found)


def small_heads_with_a_normaliser():
    """One number a head: o is v's but for a sign and eps, whatever q is, and dq what is left of terms that cancel."""
    call = example(T=40, K=1, V=1, dtype=torch.bfloat16, norm=True)
    found = errors(call, (plan(),) * 2)
    print({name: f"{mine:.0e}" for name, (mine, _) in found.items()})
    assert max(found[name][0] for name in ("state", "dstate")) <= 1e-5, found
    # rounded once, at the end
    assert max(found[name][0] for name in ("o", "dq", "dk", "dv")) <= 2.0**-8, found


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check("split columns, a ragged tail", example(), plan())
    check("a normaliser, no decay", example(g=None, norm=True), plan(columns=32))
    check("no decay, no strength, no states", example(g=None, beta=False, state=False), plan(columns=32), ends=False)
    check("grouped, widths of no tile", example(H=4, T=17, K=20, V=24), plan(columns=32, keys=32))
    check("segments", example(T=45, B=2, H=1, Hq=1), plan(columns=32, segments=3))
    check("a state kept now and then", example(T=45, H=1, Hq=1), plan(columns=32, keep=2))
    check("normalised", example(norm=True), plan())
    check("normalised segments", example(T=37, H=1, Hq=1, norm=True), plan(segments=2, columns=32))
    check("packed", example(norm=True, packed=(0, 0, 5, 21)), plan(columns=32), packed=(0, 0, 5, 21))
    check("resets", example(g="resets"), plan(columns=32))
    check("strong decays", example(g="strong"), plan(columns=32))
    check("half precision", example(dtype=torch.float16), plan(columns=32))
    for norm in (False, True):
        layouts_and_neighbours(example(T=20, K=8, V=6, norm=norm), plan())
        # whole chunks, and states kept now and then or of segments
        check("whole chunks", example(T=32, H=1, Hq=1, norm=norm), plan(columns=32, keep=2))
    check("whole segments", example(T=64, H=1, Hq=1), plan(columns=32, segments=2))
    check("one token", example(T=1), plan(columns=32))
    check("no token", example(T=0), plan(columns=32))
