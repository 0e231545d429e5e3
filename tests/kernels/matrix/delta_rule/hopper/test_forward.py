"""The delta rule on Hopper: what it refuses, that its plans compile and fit with no GPU, that it is right on one."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.variants import BackendVariants
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models.matrix.delta_rule import hopper as model
from holdfast.recurrences.definition import MatrixCall
from parity import relative_error
from plain_launches import launch_by

H200 = Device.named("h200")
SIZES = {"B": 2, "T": 4096, "H": 4, "Hq": 4, "K": 128, "V": 128}
GATED = {"delta": True, "beta": True, "decay=scalar": True}
CHUNK = 64


def problem(sizes=(), traits=(), dtype="bfloat16"):
    return Problem.of("gated_delta_rule", "matrix", dtype, SIZES | dict(sizes), GATED | dict(traits))


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), Device.named("a100"), "compute capability 9.0"),
        (problem(), Device.named("cpu"), "compute capability 9.0"),
        (problem(dtype="float32"), H200, "bfloat16 and float16"),
        (problem(traits={"delta": False}), H200, "the delta rule alone"),
        (problem(traits={"decay=vector": True}), H200, "a vector decay"),
        (problem(traits={"normalizer": True}), H200, "a normaliser"),
        (problem({"V": 20}), H200, "a V that 8 divides; got 20"),
        (problem({"K": 264}), H200, "got K = 264"),
        (problem({"K": 16, "V": 64}), H200, "computed in float32"),
        (problem({"T": 2**23}), H200, "a T up to 4194240; got 8388608"),
    ],
)
def test_a_refusal_says_why(given, device, reason):
    assert reason in HopperDelta().reject(given, device)


@pytest.mark.parametrize("sizes", [{}, {"K": 64, "V": 40}, {"Hq": 1, "V": 256}, {"T": 1}, {"K": 24}, {"K": 16}])
def test_it_serves_the_others(sizes):
    pytest.importorskip("triton.experimental.gluon")
    assert HopperDelta().reject(problem(sizes), H200) is None


def test_the_variant_that_serves_a_problem_runs_it():
    pytest.importorskip("triton.experimental.gluon")
    hopper = BackendVariants(Hopper(), HopperDelta())
    additive = Problem.of("simple_gla", "matrix", "bfloat16", SIZES, {"decay=scalar": True})
    assert hopper.name == "hopper"
    assert hopper.reject(problem(), H200) is None
    assert hopper.reject(additive, H200) is None
    assert hopper.candidates(problem(), H200, "forward") == HopperDelta().candidates(problem(), H200, "forward")
    assert hopper.candidates(additive, H200, "forward") == Hopper().candidates(additive, H200, "forward")
    assert isinstance(hopper.variant(problem(), H200), HopperDelta)
    assert isinstance(hopper.variant(additive, H200), Hopper)
    refused = hopper.reject(problem(dtype="float32"), H200)
    assert "bfloat16 and float16" in refused


def test_memory_bounds_many_heads_and_few_are_cut_into_segments():
    (large, *_), (small, *_) = (
        model.candidates(problem({"B": B, "H": H, "Hq": H}), H200, "forward") for B, H in ((4, 32), (1, 8))
    )
    # q, k, v and o once, k once more, A written and read
    assert large.moved == pytest.approx((5 + 2 * CHUNK / 128) * 2 * 4 * 4096 * 32 * 128, rel=0.05)
    assert large.plan["segment_chunks"] == 4096 // CHUNK
    assert small.plan["segment_chunks"] < 4096 // CHUNK
    assert small.seconds < large.seconds / 2


def example(
    B=2, T=130, H=4, Hq=None, K=128, V=128, dtype=torch.bfloat16, g="mild", keys="random", state=True, device="cpu"
):
    """keys: "random", or "alike": a common direction four times the noise. g: "mild", a number, or None."""
    draw = torch.Generator().manual_seed(T + K)
    heads = Hq or H
    q, k = (torch.randn(B, T, heads, K, generator=draw) for _ in "qk")
    if keys == "alike":
        k += 4 * torch.randn(B, 1, heads, K, generator=draw)
    q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.randn(B, T, H, V, generator=draw)
    beta = torch.full((B, T, H), 0.99) if keys == "alike" else torch.rand(B, T, H, generator=draw)
    decay = F.logsigmoid(torch.randn(B, T, H, generator=draw) + 3)
    if g != "mild":
        decay = None if g is None else torch.full((B, T, H), float(g))
    initial = torch.randn(B, H, K, V, generator=draw) if state else None
    floats = [None if x is None else x.to(device) for x in (decay, beta, None, initial)]
    return MatrixCall(*(x.to(device, dtype) for x in (q, k, v)), *floats, scale=K**-0.5, delta=True)


def plans_of(call, direction="forward", packed=0):
    """packed: how many sequences are."""
    B, T, H, V = call.v.shape
    sizes = {"B": B, "T": T, "H": H, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": V}
    if packed:
        sizes["N"] = packed
    traits = {"decay=scalar": call.g is not None, "varlen": packed > 0}
    given = problem(sizes, traits, str(call.v.dtype).removeprefix("torch."))
    return model.candidates(given, H200, direction)


def over(plan, **values):
    """The plan with other values."""
    return Plan(plan.backend, tuple((name, values.get(name, value)) for name, value in plan.values))


def segments_of(cu_seqlens, length, tokens):
    """Of each sequence, where its segments of so many tokens are kept, and of each where it begins and ends."""
    if cu_seqlens is None:
        return [[(i, i * tokens, min(length, i * tokens + tokens)) for i in range(-(-length // tokens))]]
    found = []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        starts = range(begin, max(begin + 1, end), tokens)
        found.append([(begin // tokens + n + i, at, min(end, at + tokens)) for i, at in enumerate(starts)])
    return found


def composed(tensors, numbers, constants):
    """In place of the launch of triton/segment_scan.py."""
    local, transition, first, states, cu_seqlens = tensors
    # what is found at a place that no segment has: a number, so that a kernel that hands it on writes something twice
    states[:] = 7.0
    length, segment_chunks, back = numbers[0], numbers[3], constants["BACK"]
    for n, sequence in enumerate(segments_of(cu_seqlens, length, segment_chunks * CHUNK)):
        own = slice(None) if cu_seqlens is None else slice(n, n + 1)
        state = torch.zeros_like(states[:, 0]) if first is None else first[own]
        order = [place for place, _, _ in sequence][:: -1 if back else 1]
        for turn, place in enumerate(order):
            states[:, place] = state
            if place != order[-1]:
                through = transition[:, place].mT if back else transition[:, place]
                state = local[:, place] + (0 if first is None and turn == 0 else through @ state)


def pulled_back(tensors, numbers, constants):
    """In place of the launch of triton/segment_dstates.py."""
    w, do, local, cu_seqlens = tensors
    local[:] = torch.nan
    for sequence in segments_of(cu_seqlens, w.shape[1], numbers[3] * CHUNK):
        for place, begin, end in sequence[1:]:
            left, right = (x[:, begin:end].float().transpose(1, 2) for x in (w, do))
            local[:, place] = left.mT @ right


def launched(kernel, blocks, tensors, numbers, constants, *_):
    """In place of a launch of a Triton kernel."""
    {"delta_rule_segment_scan": composed, "delta_rule_segment_dstates": pulled_back}[kernel.fn.__name__](
        tensors, numbers, constants
    )


def test_what_outputs_say_of_states_compiles():
    pytest.importorskip("triton")
    from holdfast.kernels.matrix.delta_rule.triton.segment_dstates import delta_rule_segment_dstates
    from triton_compile import compile_for

    pointers = dict.fromkeys(("w_ptr", "do_ptr"), torch.bfloat16) | {"local_ptr": torch.float32}
    sizes = {"sequences": 2, "T": 4096, "H": 8, "segment_chunks": 4, "do_b": 2**24, "do_t": 1024, "do_h": 128}
    constants = {"KEYS": 128, "VALUES": 128, "WIDE": 128, "BLOCK": 128}
    for offsets in (None, torch.int32, torch.int64):
        made = compile_for(
            delta_rule_segment_dstates, 90, pointers | {"cu_ptr": offsets} | sizes | constants, num_warps=8
        )
        assert made.stack == 0
        assert made.shared <= H200.shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V", "columns", "g"), [(128, 128, 128, "mild"), (64, 64, 64, None)])
def test_plans_compile_and_fit(K, V, columns, g, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch

    launches = recorded(monkeypatch, hopper_delta_launch)
    # a plain Triton kernel, compiled below
    launch_by(monkeypatch, lambda *_: None)
    call = example(K=K, V=V, g=g)
    planned = next(found for found in plans_of(call) if found.plan["columns"] == columns)
    HopperDelta().forward(over(planned.plan, state_columns=columns, segment_chunks=1), call, None)
    assert [launch.kernel.__name__ for launch in launches] == [
        "delta_rule_chunk_inverse",
        "delta_rule_fwd",
        "delta_rule_fwd",
    ]
    for launch, instruction in zip(launches, ("mma.sync", "wgmma.mma_async", "wgmma.mma_async"), strict=True):
        made = compile_launch(launch)
        assert made.shared <= H200.shared_per_block
        assert instruction in made.ptx
        assert "cp.async.bulk.tensor" in made.ptx
        assert "serialized" not in made.notes, "a product waits for the one before it"
        # a thread's number of its place, on the way into the sweep's branches
        assert made.spilled <= 8
    assert made.shared <= planned.shared


def test_the_scan_over_segments_in_the_interpreter():
    pytest.importorskip("triton")
    from interpreted import interpret

    said = interpret("kernels.matrix.delta_rule.triton.segment_scan_parity", "every")
    assert all(part in said for part in ("2 40 24 True", "packed True", "pulled back"))


def test_the_scan_over_segments_compiles():
    pytest.importorskip("triton")
    from holdfast.kernels.matrix.delta_rule.triton.segment_scan import delta_rule_segment_scan
    from triton_compile import compile_for

    pointers = dict.fromkeys(("local_ptr", "transition_ptr", "first_ptr", "enter_ptr"), torch.float32)
    numbers = {"T": 4096, "H": 8, "segments": 16, "segment_chunks": 4, "local_rows": 16, "transition_rows": 16}
    constants = {"KEYS": 128, "VALUES": 128, "WIDE": 128, "BLOCK": 16}
    for back in (False, True):
        for heads, offsets in ((1, None), (8, None), (8, torch.int32), (8, torch.int64)):
            given = pointers | {"cu_ptr": offsets} | numbers | constants | {"H": heads, "BACK": back}
            assert compile_for(delta_rule_segment_scan, 90, given, num_warps=8).stack == 0


def same_precision(call):
    """(o, state) of the same products of rounded operands, in float64 between roundings, with an exact inverse."""

    def rounded(x):
        return x.to(call.v.dtype).double()

    B, T, H, V = call.v.shape
    chunks = -(-T // CHUNK)

    def cut(x):
        x = F.pad(x.double(), (0, 0) * (x.dim() - 2) + (0, chunks * CHUNK - T))
        x = x.repeat_interleave(H // x.shape[2], 2)
        return x.unflatten(1, (chunks, CHUNK)).transpose(2, 3)

    q, k, v = (cut(x) for x in (call.q, call.k, call.v))
    beta = cut(call.beta[..., None])
    total = torch.zeros_like(beta) if call.g is None else cut(call.g.double().clamp(min=-120)[..., None]).cumsum(3)
    later = torch.ones(CHUNK, CHUNK, device=v.device, dtype=torch.bool).tril()
    within = (total - total.mT).masked_fill(~later, -torch.inf).exp()
    lower = (beta * within * (k @ k.mT)).tril(-1)
    # what the inverse has beyond the identity
    a = rounded(-torch.linalg.solve_triangular(lower, lower, upper=False, unitriangular=True))
    scores = rounded(call.scale * within * (q @ k.mT))
    end = total[..., -1:, :]
    state = call.initial_state
    state = v.new_zeros(B, H, k.shape[4], V) if state is None else state.double()
    out = []
    for i in range(chunks):
        here, read = rounded(state), total[:, i].exp()
        missed = beta[:, i] * (v[:, i] - read * (k[:, i] @ here))
        u = missed + a[:, i] @ rounded(missed)
        out.append(call.scale * read * (q[:, i] @ here) + scores[:, i] @ rounded(u))
        state = end[:, i].exp() * state + k[:, i].mT @ rounded(u * (end[:, i] - total[:, i]).exp())
    o = torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :T]
    return rounded(o), state


def exact(call, dtype=torch.float64):
    wide = MatrixCall(*(None if x is None else x.to(dtype) for x in call[:7]), *call[7:])
    return Chunked().forward(Plan("chunked", (("chunk", CHUNK), ("segment", 1024))), wide, None)


def assert_right(call, **values):
    """o and the state within 1.5 times the error of an exact inverse at the same precision.

    values: of the plan, in place of the planner's.
    """
    (best, *_) = plans_of(call)
    got = HopperDelta().forward(over(best.plan, **values), call, None)
    for name, mine, same, right in zip(("o", "state"), got, same_precision(call), exact(call), strict=True):
        error, limit = relative_error(mine.double(), right), 1.5 * relative_error(same, right)
        assert error <= limit, (name, error, limit)


def test_the_same_precision_is_near_the_truth():
    call = example(B=1, H=1, K=32, V=32)
    for found, right in zip(same_precision(call), exact(call), strict=True):
        assert 1e-4 < relative_error(found, right) < 8e-3


@pytest.mark.parametrize(
    ("given", "columns", "state_columns", "segment_chunks"),
    [
        ({"T": 130, "B": 2, "H": 1}, 128, 128, 100),
        ({"T": 200, "H": 2, "Hq": 1, "K": 48, "V": 80, "state": False}, 64, 64, 100),
        ({"T": 200, "g": None}, 64, 128, 2),
        ({"T": 130, "V": 80, "dtype": torch.float16}, 128, 64, 1),
        ({"T": 256, "g": -1e-4, "keys": "alike", "state": False}, 128, 128, 100),
        ({"T": 128, "g": float("-inf"), "K": 64, "V": 64}, 64, 64, 1),
    ],
)
def test_right_on_a_cpu(given, columns, state_columns, segment_chunks, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch

    monkeypatch.setattr(hopper_delta_launch, "launch", gluon_partitions_emulator.launch)
    launch_by(monkeypatch, launched)
    assert_right(
        example(**{"B": 1, "H": 1} | given), columns=columns, state_columns=state_columns, segment_chunks=segment_chunks
    )


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [
        (128, 128, torch.bfloat16),
        (128, 128, torch.float16),
        (64, 64, torch.float16),
        (64, 128, torch.bfloat16),
        (48, 24, torch.bfloat16),
        (128, 256, torch.bfloat16),
    ],
)
def test_right_at_every_width(K, V, dtype):
    assert_right(example(T=700, K=K, V=V, dtype=dtype, device="cuda"))


@gpu
@pytest.mark.parametrize("T", [1, 63, 64, 65, 4095])
def test_right_at_every_length(T):
    assert_right(example(B=1, T=T, H=2, state=T != 64, device="cuda"))


@gpu
@pytest.mark.parametrize("g", [None, 0.0, -50.0, float("-inf")])
def test_right_at_every_decay(g):
    assert_right(example(g=g, device="cuda"))


@gpu
@pytest.mark.parametrize(
    ("K", "V", "Hq", "columns", "segment_chunks"),
    [(128, 128, 2, 64, 100), (128, 128, 2, 64, 3), (128, 128, 4, 128, 1), (48, 80, 1, 128, 3)],
)
def test_right_with_shared_heads_and_in_segments(K, V, Hq, columns, segment_chunks):
    call = example(T=600, H=4, Hq=Hq, K=K, V=V, device="cuda")
    assert_right(call, columns=columns, state_columns=columns, segment_chunks=segment_chunks)


@gpu
@pytest.mark.parametrize(
    ("T", "H", "dtype"), [(4096, 4, torch.bfloat16), (4096, 4, torch.float16), (131072, 1, torch.bfloat16)]
)
def test_right_where_keys_are_alike_and_nothing_decays(T, H, dtype):
    assert_right(example(B=1, T=T, H=H, g=-1e-4, keys="alike", state=False, dtype=dtype, device="cuda"))


@gpu
def test_tensors_that_are_views():
    whole = F.normalize(torch.randn(2, 200, 3, 4, 128, device="cuda"), dim=-1).to(torch.bfloat16)
    call = example(T=200, device="cuda")
    assert_right(call._replace(q=whole[:, :, 0], k=whole[:, :, 1], v=whole[:, :, 2], beta=call.beta.mT.contiguous().mT))


@gpu
def test_two_runs_are_bit_equal_and_write_everything():
    call = example(T=333, device="cuda")
    (best, *_) = plans_of(call)
    first, second = (HopperDelta().forward(over(best.plan, segment_chunks=2), call, None) for _ in range(2))
    assert all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(first, second, strict=True))


@gpu
def test_a_decay_of_nan_shows():
    call = example(T=300, device="cuda")
    call.g[0, 100, 0] = torch.nan
    (best, *_) = plans_of(call)
    o, state = HopperDelta().forward(best.plan, call, None)
    assert o[0, 100:, 0].isnan().all()
    assert state[0, 0].isnan().all()
    assert not o[1].isnan().any()


@gpu
def test_gradients_through_the_op():
    call = example(T=300, Hq=2, device="cuda")

    def gradients(dtype, backend):
        given = [call.q, call.k, call.v, call.g, call.beta, call.initial_state]
        q, k, v, g, beta, state = inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        o, final = holdfast.gated_delta_rule(
            q, k, v, g, beta, initial_state=state, scale=call.scale, output_final_state=True, backend=backend
        )
        return torch.autograd.grad(o.double().square().sum() + final.double().square().sum(), inputs)

    for name, mine, right in zip("qkvgbS", gradients(None, "hopper"), gradients(torch.float64, "chunked"), strict=True):
        # of o's own rounding too, which its gradient here is twice of
        assert relative_error(mine.double(), right) <= 1.5e-2, name
