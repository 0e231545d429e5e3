"""The Triton kernels of the scans and of intra_chunk on a GPU: what must hold of any backend, and what sizes break."""

import pytest
import torch

import holdfast
from holdfast.kernels.backend import describe
from holdfast.kernels.chunk.inter.triton.backend import TritonInterChunkScan
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.chunk.intra.hopper.backend import HopperIntraChunk
from holdfast.kernels.chunk.intra.triton.backend import TritonIntraChunk
from holdfast.ops import diagonal, inter_chunk_scan, intra_chunk
from holdfast.planner import Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from kernels.chunk.inter.triton import parity as states_parity
from kernels.chunk.intra.triton import parity as intra_chunk_parity
from kernels.diagonal.hopper import parity as hopper_parity
from kernels.diagonal.triton import parity as scan_parity
from kernels.diagonal.triton import recomputation
from parity import assert_close, cast, leaves, op_and_oracle, relative_error, values_and_grads

pytestmark = pytest.mark.gpu

NAMES = ["rglru", "rotlru", "hgrn"]
every_op = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def example(name, dtype=torch.float32, **sizes):
    return RECURRENCES[name].example(Draw(0, dtype, "cuda"), Sizes(**sizes))


def run(name, arguments, backend="triton"):
    return getattr(holdfast, name)(**arguments, output_final_state=True, backend=backend)


@every_op
@every_dtype
@pytest.mark.parametrize("segments", [4, 16])
@pytest.mark.parametrize("how", ["whole", "packed", "pieces"])
def test_the_scan_matches_the_oracle_with_negative_and_zero_gates(name, dtype, segments, how):
    plan = scan_parity.plan(64, segments, 16 // segments, 3, 4, 64 if how == "pieces" else 0)
    packed = [0, 0, 3, 190, 300, 300] if how == "packed" else None
    scan_parity.check(name, dtype, 300, plan, packed, channels=98, device="cuda")


@every_op
@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_the_output_alone_and_of_the_final_state_alone(name, used):
    arguments = example(name, T=150, D=34)
    got = values_and_grads(lambda a: run(name, a)[used], arguments)
    exact = values_and_grads(lambda a: oracle(RECURRENCES[name], a)[used], cast(arguments, torch.float64))
    assert_close(got, exact, 2e-5)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_half_precision_errs_at_most_twice_as_much_as_the_step_loop(name, dtype, packed):
    arguments = example(name, dtype, B=1, T=300, D=64)
    cu_seqlens = torch.tensor([0, 100, 100, 300], device="cuda") if packed else None
    if packed:
        arguments["initial_state"] = Draw(3, dtype, "cuda").state(3, 64)
    options = {"cu_seqlens": cu_seqlens, "backend": "triton"}
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, **options)

    def loop(a):
        h, state = oracle(RECURRENCES[name], a, cu_seqlens)
        return h.to(dtype), state

    for mine, theirs, right in zip(got, values_and_grads(loop, arguments), exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@every_op
@pytest.mark.parametrize("at", [0, 1, 17, 128, 199, 200])
def test_a_sequence_may_be_split_anywhere(name, at):
    arguments = example(name, T=200, D=34)
    whole, final = run(name, arguments)
    cut = [
        {key: x if key == "initial_state" else x[:, part] for key, x in arguments.items()}
        for part in (slice(0, at), slice(at, None))
    ]
    first, state = run(name, cut[0])
    second, last = run(name, cut[1] | {"initial_state": state})
    assert_close([torch.cat([first, second], 1), last], [whole, final], 1e-6)


@every_op
def test_no_steps_return_the_initial_state_and_its_gradient(name):
    arguments = example(name, T=0)
    initial = arguments["initial_state"].requires_grad_()
    h, final = run(name, arguments)
    assert h.shape == arguments["x"].shape
    assert torch.equal(final, initial)
    given = torch.randn_like(final)
    (grad,) = torch.autograd.grad(final, initial, given)
    assert torch.equal(grad, given)


@every_op
@pytest.mark.parametrize("sizes", [{"T": 1, "D": 2}, {"T": 1000, "D": 2, "B": 1}, {"T": 65, "D": 1000}])
def test_any_length_and_width(name, sizes):
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], example(name, **sizes), backend="triton")
    assert_close(got, exact, 2e-5)


@every_op
@pytest.mark.parametrize("sizes", [{"T": 1, "D": 32}, {"T": 65, "D": 992, "B": 1}])
def test_any_length_and_width_on_hopper(name, sizes):
    arguments = example(name, torch.bfloat16, **sizes)
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, backend="hopper")
    assert_close(got, exact, 2.0**-7)


@every_op
def test_inputs_that_are_not_contiguous(name):
    arguments = example(name, T=40, D=32)
    strided = {
        key: x if key == "initial_state" else x.transpose(0, 1).contiguous().transpose(0, 1)
        for key, x in arguments.items()
    }
    strided["x"] = strided["x"].flip(2).mT.contiguous().mT.flip(2)
    for x, y in zip(
        values_and_grads(lambda a: run(name, a), strided),
        values_and_grads(lambda a: run(name, a), arguments),
        strict=True,
    ):
        assert torch.equal(x, y)


@every_op
@every_dtype
def test_runs_repeat_bit_for_bit(name, dtype):
    arguments = example(name, getattr(torch, dtype), T=2000, D=64)
    first, second = (values_and_grads(lambda a: run(name, a), arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@every_op
@pytest.mark.parametrize("segments", [4, 16])
@pytest.mark.parametrize("packed", [None, [0, 0, 70, 200]])
def test_the_backward_pass_computes_the_forward_states_again_bit_for_bit(name, segments, packed):
    which = scan_parity.plan(32, segments, 16 // segments, 3, 4)
    recomputation.check(name, torch.bfloat16, 200, which, packed, device="cuda", channels=64)


@every_op
@pytest.mark.parametrize(("dtype", "packed"), [("bfloat16", None), ("float16", [0, 0, 3, 90, 300, 300])])
@pytest.mark.parametrize(("groups", "warps"), [(1, 1), (1, 2), (4, 4)])
def test_the_hopper_scan_matches_the_oracle(name, dtype, packed, groups, warps):
    """Tiles of one group of warps and of four; a thread has two channels or pairs, or one."""
    block = 32 if name == "rotlru" and groups > 1 else 64
    plan = scan_parity.hopper(block, 32, 2, warps, groups)
    scan_parity.check(name, dtype, 300, plan, packed, channels=224, device="cuda")


@every_op
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_the_hopper_scan_of_whole_tiles(name, groups):
    """A tile forward and one backward, and one step less and more, alone and packed."""
    if name == "rotlru" and groups == 8:
        pytest.skip("backward, eight groups of 32 pairs with float32 gates take 266,240 bytes of shared memory")
    # so do eight groups of 64 channels
    plan = scan_parity.hopper(32 if name == "rotlru" or groups == 8 else 64, 16, 2, groups, groups)
    lengths = [n + more for n in sorted({16 * groups, 32 * groups}) for more in (-1, 0, 1)]
    for length in lengths:
        scan_parity.check(name, "float16", length, plan, batch=1, channels=64, device="cuda")
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    scan_parity.check(name, "float16", offsets[-1], plan, offsets, channels=64, device="cuda")
    scan_parity.layouts_and_neighbours(name, "float16", plan, [0, 20, 75, 160], 64, "cuda")


@every_op
@every_dtype
def test_views_and_neighbours(name, dtype):
    scan_parity.layouts_and_neighbours(name, dtype, scan_parity.plan(32, 4, 4, 3, 4), [0, 20, 75, 160], 64, "cuda")


@pytest.mark.parametrize(("length", "groups"), [(33, 1), (64, 1), (200, 1), (64, 4), (200, 4), (330, 4)])
def test_the_hopper_backward_pass_computes_the_forward_states_again_bit_for_bit(length, groups):
    hopper_parity.check_recomputation("rglru", length, groups, device="cuda")


@every_op
@pytest.mark.parametrize("groups", [1, 4])
def test_the_hopper_scan_takes_strided_inputs(name, groups):
    hopper_parity.check_strides(name, 70, groups=groups, device="cuda")


@every_op
def test_the_hopper_scan_through_the_op(name):
    """At the size that is timed: against the Triton scan, and its own repetition bit for bit."""
    arguments = example(name, torch.bfloat16, B=2, T=4096, D=2048)

    def both(backend):
        return values_and_grads(
            lambda a: getattr(holdfast, name)(**a, output_final_state=True, backend=backend), arguments
        )

    first, second = both("hopper"), both("hopper")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert_close(first, both("triton"), 2.0**-7)


@every_op
@pytest.mark.parametrize("width", [8, 1024])
def test_a_million_steps(name, width):
    arguments = example(name, T=1_000_000 if width == 8 else 100_000, D=width, B=1)
    wide = cast(arguments, torch.float64)
    exact = values_and_grads(lambda a: getattr(holdfast, name)(**a, output_final_state=True, backend="chunked"), wide)
    assert_close(values_and_grads(lambda a: run(name, a), arguments), exact, 2e-5)


@every_op
def test_a_million_steps_on_hopper(name):
    arguments = example(name, torch.bfloat16, T=1_000_000, D=32, B=1)
    wide = cast(arguments, torch.float64)
    exact = values_and_grads(lambda a: getattr(holdfast, name)(**a, output_final_state=True, backend="chunked"), wide)
    assert_close(values_and_grads(lambda a: run(name, a, "hopper"), arguments), exact, 2.0**-7)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_more_than_two_to_the_31_elements(backend):
    length, width, tail = 2**20 + 300, 2112, 200
    a = torch.full((1, length, width), 0.5, dtype=torch.bfloat16, device="cuda")
    # nothing before the tail reaches it
    a[:, -tail] = 0
    x = torch.empty_like(a).normal_()
    short_a, short_x = a[:, -tail:].clone().requires_grad_(), x[:, -tail:].clone()
    h, final = run("rglru", {"a": a.requires_grad_(), "x": x}, backend)
    short, last = run("rglru", {"a": short_a, "x": short_x}, backend)
    assert relative_error(h[:, -tail:].double(), short.double()) <= 2.0**-8
    assert relative_error(final, last) <= 1e-6
    (grad,) = torch.autograd.grad(h, a, x)
    (expected,) = torch.autograd.grad(short, short_a, short_x)
    # the first step of the tail has a state before it in one call and none in the other
    assert relative_error(grad[:, 1 - tail :].double(), expected[:, 1:].double()) <= 2.0**-7


@every_dtype
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 4, 16])
@pytest.mark.parametrize("packed", [None, [0, 0, 2, 6, 33, 33]])
def test_the_scan_of_states_matches_the_loop(dtype, vector, rank, packed):
    traits = {"decay=vector": vector, "low_rank": rank > 0, "varlen": packed is not None, "needs_grad": True}
    sizes = {"B": 2, "G": 33, "H": 3, "K": 40, "V": 72, "r": rank}
    problem = Problem.of("inter_chunk_scan", "diagonal", dtype, sizes, traits)
    backend, device = TritonInterChunkScan(), describe(torch.device("cuda"))
    plans = [backend.candidates(problem, device, direction)[0].plan for direction in ("forward", "backward")]
    shape = {"vector": vector, "rank": rank, "chunks": 33, "keys": 40, "values": 72}
    states_parity.check(dtype, plans[0], packed, "cuda", plans[1], **shape)


@pytest.mark.parametrize(
    ("dtype", "vector", "rank", "packed", "keys"),
    [
        ("bfloat16", False, 4, None, 64),
        ("float32", True, 1, [0, 0, 2, 6, 33, 33], 32),
        ("float16", True, 16, [0, 0, 2, 6, 33, 33], 16),
        ("float32", False, 2, None, 128),
    ],
)
def test_the_hopper_scan_of_states_matches_the_loop(dtype, vector, rank, packed, keys):
    for columns, values in ((16, 80), (32, 96)):
        shape = {"vector": vector, "rank": rank, "chunks": 33, "keys": keys, "values": values}
        states_parity.check(dtype, states_parity.hopper(keys, columns=columns), packed, "cuda", **shape)


def test_the_hopper_scan_of_states_through_the_op():
    """At the size that is timed: its own repetition bit for bit, and Triton's."""
    shape = {"batch": 4, "chunks": 64, "heads": 16, "keys": 64, "values": 64}
    given = states_parity.call(torch.bfloat16, rank=4, **shape, device="cuda")._asdict()

    def both(backend):
        return values_and_grads(lambda a: inter_chunk_scan(**a, output_final_state=True, backend=backend), given)

    first, second = both("hopper"), both("hopper")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert_close(first, both("triton"), 2.0**-7)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scan_of_states_is_the_loop_bit_for_bit(vector, dtype):
    given = states_parity.call(dtype, vector, batch=2, chunks=70, heads=4, keys=64, values=64, device="cuda")
    h, final = inter_chunk_scan(**given._asdict(), output_final_state=True, backend="triton")
    state, decay = given.initial_state, given.decay.exp()
    for n in range(70):
        state = decay[:, n].reshape(2, 4, -1, 1) * state + given.states[:, n]
        assert torch.equal(h[:, n], state.to(dtype))
    assert torch.equal(final, state)


def test_the_scan_of_more_than_two_to_the_31_states():
    heads, width = 4, 128
    chunks = 2**31 // (heads * width * width) + 40
    states = torch.empty(1, chunks, heads, width, width, dtype=torch.bfloat16, device="cuda").normal_()
    decay = torch.full((1, chunks, heads), -0.1, device="cuda")
    decay[:, -20] = -torch.inf
    h, final = inter_chunk_scan(states, decay, output_final_state=True, backend="triton")
    short, last = inter_chunk_scan(states[:, -20:], decay[:, -20:], output_final_state=True, backend="triton")
    assert torch.equal(h[:, -20:], short)
    assert torch.equal(final, last)


SHAPES = [
    {"length": 300, "chunk": 128, "keys": 64, "values": 64},
    {"length": 200, "chunk": 100, "keys": 48, "values": 40, "harsh": True},
    {"length": 50, "chunk": 16, "keys": 16, "values": 24, "groups": 2},
    {"length": 700, "chunk": 512, "keys": 128, "values": 256},
    {"length": 129, "chunk": 64, "keys": 256, "values": 16},
]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given", ["", "g states gate"])
def test_intra_chunk_matches_the_loop(dtype, shape, given):
    mine = intra_chunk_parity.call(getattr(torch, dtype), given, device="cuda", **shape)
    device, backend = describe(torch.device("cuda")), TritonIntraChunk()
    batch, length, heads, width = mine.v.shape
    sizes = {"B": batch, "T": length, "H": heads, "Hq": mine.q.shape[2], "K": mine.k.shape[3], "V": width}
    sizes["C"] = mine.chunk_size
    traits = {"states": mine.states is not None, "gate=silu": mine.gate is not None, "needs_grad": True}
    problem = Problem.of("intra_chunk", "matrix", dtype, sizes, traits)
    plans = [backend.candidates(problem, device, direction)[0].plan for direction in ("forward", "backward")]
    intra_chunk_parity.check(dtype, *plans, given=given, device="cuda", **shape)


@pytest.mark.parametrize(
    ("dtype", "slots", "backward", "shape"),
    [
        ("float16", 4, (None, 14), {"length": 300, "chunk": 128, "keys": 64, "values": 64}),
        (
            "bfloat16",
            3,
            (None, 13),
            {"length": 600, "chunk": 256, "keys": 128, "values": 128, "harsh": True, "batch": 2},
        ),
        ("float16", 4, (8,), {"length": 100, "chunk": 64, "keys": 64, "values": 128, "given": ""}),
        ("float16", 4, (4,), {"length": 200, "chunk": 64, "keys": 64, "values": 64, "harsh": True}),
        ("bfloat16", 3, (8,), {"length": 200, "chunk": 64, "keys": 128, "values": 128, "activation": "sigmoid"}),
        (
            "bfloat16",
            3,
            (None, 14),
            {"length": 700, "chunk": 512, "keys": 128, "values": 64, "given": "g", "activation": "sigmoid"},
        ),
        ("float16", 4, (None, 18), {"length": 200, "chunk": 256, "keys": 64, "values": 64, "given": "states gate"}),
    ],
    ids=str,
)
def test_intra_chunk_on_hopper_matches_the_loop(dtype, slots, backward, shape):
    plans = intra_chunk_parity.hopper(slots), intra_chunk_parity.hopper_backward(*backward)
    intra_chunk_parity.check(dtype, *plans, device="cuda", groups=2, half_states=True, **shape)


def test_gradients_of_grouped_heads_on_hopper_are_tritons():
    plans = intra_chunk_parity.hopper(3), intra_chunk_parity.plan(32, 64)
    shape = {"length": 200, "chunk": 128, "keys": 64, "values": 128, "heads": 4, "groups": 2}
    intra_chunk_parity.check("float16", *plans, device="cuda", half_states=True, **shape)


@pytest.mark.parametrize(
    ("chunk", "backward"), [(64, intra_chunk_parity.hopper_backward(4)), (128, intra_chunk_parity.hopper_backward())]
)
def test_gradients_of_intra_chunk_on_hopper_at_the_size_that_is_timed(chunk, backward):
    """Many blocks at once: the bits of two runs, and those of one sequence alone."""
    call = intra_chunk_parity.call(torch.float16, "g states gate", 2048, chunk, 16, 12, 12, 64, 64, device="cuda")
    call = call._replace(states=call.states.half())
    grad_o = torch.randn_like(call.v)
    first, second = (HopperIntraChunk().backward(backward, call, grad_o) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    alone = call._replace(**{name: getattr(call, name)[5:6] for name in intra_chunk_parity.NAMES})
    found = HopperIntraChunk().backward(backward, alone, grad_o[5:6])
    assert all(torch.equal(x[5:6], y) for x, y in zip(first, found, strict=True))


def test_intra_chunk_on_hopper_at_the_size_that_is_timed():
    """Many blocks at once: the bits of two runs, and of one sequence alone."""
    call = intra_chunk_parity.call(torch.float16, "g states gate", 256, 256, 16, 12, 12, 128, 128, device="cuda")
    call = call._replace(states=call.states.half())
    first, second = (HopperIntraChunk().forward(intra_chunk_parity.hopper(3), call) for _ in range(2))
    assert torch.equal(first, second)
    alone = call._replace(**{name: getattr(call, name)[5:6] for name in intra_chunk_parity.NAMES})
    assert torch.equal(first[5:6], HopperIntraChunk().forward(intra_chunk_parity.hopper(3), alone))
    plain = TritonIntraChunk().forward(intra_chunk_parity.plan(64, 128), call)
    assert relative_error(first.double(), plain.double()) <= 2e-3


def test_intra_chunk_with_a_sigmoid_gate():
    plan = intra_chunk_parity.plan(64, 64)
    intra_chunk_parity.check("float32", plan, plan, activation="sigmoid", device="cuda", length=130, chunk=64)


@pytest.mark.parametrize("backend", [TritonIntraChunk(), HopperIntraChunk()], ids=lambda backend: backend.name)
def test_intra_chunk_of_more_than_two_to_the_31_elements(backend):
    heads, width, chunk = 64, 128, 64
    length = 2**31 // (heads * width) + 300
    q, k, v = (torch.empty(1, length, heads, width, dtype=torch.float16, device="cuda").normal_() for _ in range(3))
    given = IntraChunkCall(q, k, v, torch.full((1, length, heads), -0.1, device="cuda"), chunk_size=chunk)
    start = (length - 1) // chunk * chunk
    tail = given._replace(**{name: getattr(given, name)[:, start:] for name in "qkvg"})
    # one plan for both: blocks of other sizes add in another order
    plan = intra_chunk_parity.plan(64, 128) if backend.name == "triton" else intra_chunk_parity.hopper(3)
    assert torch.equal(backend.forward(plan, given)[:, start:], backend.forward(plan, tail))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)])
def test_the_two_primitives_are_the_single_pass(dtype, limit):
    chunk, draw = 64, Draw(0, dtype, "cuda")
    q, k, v = draw.normal(2, 256, 3, 32), draw.unit(2, 256, 3, 32), draw.normal(2, 256, 3, 48)
    g, state = draw.log_decay(2, 256, 3), draw.state(2, 3, 32, 48)
    inputs = {"q": q, "k": k, "v": v, "g": g, "initial_state": state}

    def composed(a):
        k, v, g = (a[name].unflatten(1, (-1, chunk)) for name in "kvg")
        total = g.sum(2)
        to_end = (total[:, :, None] - g.cumsum(2)).exp()
        writes = torch.einsum("bgchk,bgch,bgchv->bghkv", k.float(), to_end, v.float()).to(dtype)
        after, final = inter_chunk_scan(
            writes, total, initial_state=a["initial_state"], output_final_state=True, backend="triton"
        )
        entering = torch.cat([a["initial_state"][:, None].to(dtype), after[:, :-1]], 1)
        o = intra_chunk(a["q"], a["k"], a["v"], a["g"], entering, chunk_size=chunk, backend="triton")
        return o, final

    exact = values_and_grads(lambda a: oracle(RECURRENCES["simple_gla"], a), cast(inputs, torch.float64))
    assert_close(values_and_grads(composed, inputs), exact, limit)
    single = values_and_grads(lambda a: holdfast.simple_gla(**a, output_final_state=True), inputs)
    assert_close(values_and_grads(composed, inputs), [x.double() for x in single], 2 * limit)


def primitives():
    scan = states_parity.call(torch.float32, rank=4, keys=16, values=16, device="cuda")
    inside = intra_chunk_parity.call(torch.float32, "g states gate", 40, 16, device="cuda")
    return {
        "inter_chunk_scan": (
            lambda c: inter_chunk_scan(**c._asdict(), output_final_state=True, backend="triton"),
            scan,
        ),
        "intra_chunk": (lambda c: intra_chunk(**c._asdict(), backend="triton"), inside),
    }


@pytest.mark.parametrize("name", ["inter_chunk_scan", "intra_chunk"])
def test_a_replayed_graph_computes_what_the_primitives_do(name):
    op, given = primitives()[name]
    static = [x.requires_grad_() for x in leaves(list(given))]

    def step():
        for x in static:
            x.grad = None
        out = leaves(op(given))
        sum(x.square().sum() for x in out).backward()
        return [*out, *(x.grad for x in static)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in static:
            x.mul_(0.5)
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["inter_chunk_scan", "intra_chunk"])
def test_the_primitives_repeat_bit_for_bit(name):
    op, given = primitives()[name]
    names = [key for key, x in given._asdict().items() if isinstance(x, torch.Tensor)]
    arguments = {key: getattr(given, key) for key in names}
    first, second = (values_and_grads(lambda a: op(given._replace(**a)), arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@every_op
@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "triton"), (torch.bfloat16, "triton"), (torch.bfloat16, "hopper")]
)
def test_opcheck_of_the_scan(name, dtype, backend, monkeypatch):
    # a plan keeps fewer states than there is room for: rows that nothing sets would be NaN, which equals nothing
    room = diagonal.entries_of
    monkeypatch.setattr(diagonal, "entries_of", lambda *args: room(*args).zero_())
    call, _ = RECURRENCES[name].map(**example(name, dtype, T=40, D=32))
    leaf = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in call]
    forward, backward = torch.ops.holdfast.diagonal_forward.default, torch.ops.holdfast.diagonal_backward.default
    torch.library.opcheck(forward, (*leaf, None, name, True, backend))
    h, state, entries = forward(*call, None, name, True, backend)
    kept = (h, None) if dtype == torch.float32 else (None, entries)
    grads = (torch.ones_like(h), torch.ones_like(state), *kept)
    torch.library.opcheck(backward, (*grads, *call, None, name, backend))


def test_opcheck_of_the_primitives():
    given = states_parity.call(torch.float32, rank=2, keys=16, values=16, device="cuda")
    leaf = [x.clone().requires_grad_() for x in given]
    torch.library.opcheck(torch.ops.holdfast.inter_chunk_forward.default, (*leaf, None, True, "triton", True))
    inside: IntraChunkCall = intra_chunk_parity.call(torch.float32, "g states gate", 40, 16, device="cuda")
    leaf = [x.clone().requires_grad_() for x in inside[:6]]
    torch.library.opcheck(torch.ops.holdfast.intra_chunk_forward.default, (*leaf, 0.5, 16, "silu", True, "triton"))
