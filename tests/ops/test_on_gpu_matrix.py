"""The matrix family's Triton kernels on an NVIDIA GPU: right at every size and dtype, safe to repeat and to capture."""

import pytest
import torch

import holdfast
from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import matrix, step
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from kernels.matrix.decode.triton import parity as decode_parity
from kernels.matrix.mlstm.gates import parity as mlstm_gates_parity
from kernels.matrix.scalar_decay.triton.parity import apart, errors, example, layouts_and_neighbours, moved
from parity import leaves, relative_error, values_and_grads

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)
SERVED = ["simple_gla", "retnet", "lightning", "linear_attention", "ssd", "mlstm"]


def plans(call, packed=False):
    cu_seqlens = torch.tensor([0, 1]) if packed else None
    device = describe(torch.device("cuda", 0))
    problem = matrix.problem("simple_gla", call, cu_seqlens, True)
    return [TritonSinglePass().candidates(problem, device, way)[0].plan for way in ("forward", "backward")]


def assert_parity(call, packed=None, **options):
    """At most twice the error of the PyTorch path in the same dtype.

    That path's products are in float32 whatever the dtype, so that its states and gates' gradients, which are float32,
    carry no rounding of operands: of those the bound is that of the output. In float32 the kernels' products are of
    three TF32 products each, exact to 2^-22 where float32 is to 2^-24: 1e-6 whatever that path's error. dg, a running
    sum over tokens and chunks of terms that cancel, may have 8e-3, the bound that the kernels were built to, and 2e-6.
    """
    found = errors(call, plans(call, packed is not None), packed, device="cuda", exact=Chunked, **options)
    half = call.v.dtype in HALF
    for name, (mine, theirs) in found.items():
        floor = (8e-3 if half else 2e-6) if name == "dg" else 0.0 if half else 1e-6
        assert mine <= max(2 * theirs, 2 * found["o"][1], floor), (name, found)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000, 4095])
def test_lengths(T, dtype):
    assert_parity(example(B=2, T=T, H=4, Hq=4, K=64, V=64, dtype=dtype))


@pytest.mark.parametrize(("K", "V"), [(16, 16), (16, 256), (24, 40), (128, 64), (128, 128), (256, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widths(K, V, dtype):
    assert_parity(example(B=1, T=300, H=4, Hq=2, K=K, V=V, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
def test_packed(dtype, norm):
    packed = (0, 0, 1, 64, 300, 1000, 1000)
    call = example(T=1000, H=4, Hq=2, K=64, V=48, dtype=dtype, norm=norm, packed=packed)
    assert_parity(apart(call, packed) if norm and dtype in HALF else call, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
def test_views_and_neighbours(dtype, norm):
    packed = (0, 100, 230, 300)
    call = moved(example(T=300, H=4, Hq=2, K=64, V=48, dtype=dtype, norm=norm), "cuda")
    # a plan for packed sequences cuts none of them into segments, and serves the equal ones too
    layouts_and_neighbours(call, plans(call, packed=True), packed=packed, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normalised(dtype):
    call = example(B=2, T=1000, H=4, Hq=4, K=64, V=64, dtype=dtype, norm=True)
    assert_parity(apart(call) if dtype in HALF else call)


@pytest.mark.parametrize("g", ["none", "moderate", "resets"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decays(g, dtype):
    assert_parity(example(B=1, T=1000, H=4, Hq=4, K=64, V=64, dtype=dtype, g=g))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decays_of_fifty(dtype, ends):
    """Their gradient of the order of 1e-22 is right, beside one of order 1 through the last state too."""
    call = example(B=1, T=300, H=4, Hq=4, K=64, V=64, dtype=dtype, g="strong", state=ends)
    found = errors(call, plans(call), device="cuda", exact=Chunked, ends=ends)
    limit = 1e-2 if dtype in HALF else 2e-5
    assert all(mine <= limit for mine, _ in found.values()), found


def test_a_long_sequence():
    assert_parity(example(B=1, T=131072, H=1, Hq=1, K=64, V=64, dtype=torch.bfloat16))


def test_log_decay_gradient_at_proposal_039s_length():
    found = errors(
        example(B=1, T=4096, H=8, Hq=8, K=128, V=128, dtype=torch.bfloat16, beta=False),
        plans(example(B=1, T=4096, H=8, Hq=8, K=128, V=128, dtype=torch.bfloat16, beta=False)),
        device="cuda",
        exact=Chunked,
    )
    assert found["dg"][0] <= 8e-3, found


def arguments_of(name, seed=0, **sizes):
    sizes = {"B": 2, "T": 130, "H": 4, "K": 32, "V": 32} | sizes
    return RECURRENCES[name].example(Draw(seed, device="cuda"), Sizes(**sizes))


@pytest.mark.parametrize("name", SERVED)
def test_runs_repeat_bit_for_bit(name):
    def run(a):
        return getattr(holdfast, name)(**a, output_final_state=True, backend="triton")

    first, second = (values_and_grads(run, arguments_of(name)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_backward_twice_over_one_graph():
    arguments = arguments_of("simple_gla")
    given = leaves(arguments)
    for x in given:
        x.requires_grad_()
    o, _ = holdfast.simple_gla(**arguments, backend="triton")
    first = torch.autograd.grad(o.square().sum(), given, retain_graph=True)
    second = torch.autograd.grad(o.square().sum(), given)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_two_streams():
    arguments = arguments_of("simple_gla", T=2000)
    expected, _ = holdfast.simple_gla(**arguments, backend="triton")
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(holdfast.simple_gla(**arguments, backend="triton")[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_device_that_is_not_the_current_one(backend):
    # few heads: their sequences are cut into segments, which takes every kernel
    arguments = arguments_of("simple_gla", B=1, T=4096, H=2, K=64, V=64)
    arguments |= {name: arguments[name].bfloat16() for name in "qkv"}

    def run(device):
        inputs = {name: x.to(device).requires_grad_() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        o, state = holdfast.simple_gla(**inputs, output_final_state=True, backend=backend)
        grads = torch.autograd.grad([o.float().sum() + state.sum()], list(inputs.values()))
        return [x.cpu() for x in (o, state, *grads)]

    assert torch.cuda.current_device() == 0
    assert all(torch.equal(x, y) for x, y in zip(run("cuda:1"), run("cuda:0"), strict=True))


@pytest.mark.parametrize("name", SERVED)
def test_compiles_as_one_graph(name):
    arguments = arguments_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(getattr(holdfast, name), fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: getattr(holdfast, name)(**a, backend="triton"), arguments)
    graph = values_and_grads(lambda a: compiled(**a, backend="triton"), arguments)
    assert all(relative_error(x, y) <= 1e-6 for x, y in zip(graph, eager, strict=True))


@pytest.mark.parametrize("packed", [None, (0, 3, 70)])
def test_opcheck(packed):
    call = moved(example(T=70, K=16, V=16, norm=True, packed=packed), "cuda")
    call = type(call)(*(x.requires_grad_() for x in call[:7]), *call[7:])
    cu_seqlens = torch.tensor(packed, device="cuda") if packed else None
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, (*call, cu_seqlens, "mlstm", True, "triton"))
    i, f = (torch.randn(1, 70, 2, device="cuda", requires_grad=True) for _ in range(2))
    m = torch.randn(2 if packed else 1, 2, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.holdfast.mlstm_gates.default, (i, f, m, cu_seqlens, True))


def test_permuted_inputs_and_other_devices_strides():
    q, k, v = (torch.randn(2, 4, 130, 32, device="cuda").movedim(1, 2) for _ in range(3))
    g = -torch.rand(2, 4, 130, device="cuda").movedim(1, 2)
    o, _ = holdfast.simple_gla(q, k, v, g, backend="triton")
    same, _ = holdfast.simple_gla(*(x.contiguous() for x in (q, k, v, g)), backend="triton")
    assert torch.equal(o, same)


def test_offsets_past_32_bits():
    # 2^31 elements and more, in 16 GiB: the last head of the last token is past what 32 bits address
    B, T, H, D = 1, 1 << 17, 130, 128
    v = torch.zeros(B, T, H, D, dtype=torch.bfloat16, device="cuda")
    v[:, -64:] = 1
    q = torch.ones(B, T, 1, 16, dtype=torch.bfloat16, device="cuda")
    o, state = holdfast.linear_attention(q, q, v, scale=1.0, output_final_state=True, backend="triton")
    assert o[0, -1].eq(64 * 16).all()
    assert o[0, :-64].eq(0).all()
    assert state.eq(64).all()


@pytest.mark.parametrize("name", decode_parity.MATRIX)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding(name, dtype):
    decode_parity.check(name, dtype, columns=32, device="cuda", Hq=2, K=128, V=64)
    decode_parity.check(name, dtype, columns=32, device="cuda", B=1024, H=2, K=24, V=20)
    for views in range(3):
        decode_parity.check(name, dtype, columns=32, device="cuda", views=views, H=2, K=24, V=20)


def test_a_captured_graph_decodes_on_one_state():
    def token(n):
        arguments = arguments_of("simple_gla", seed=n, T=1)
        del arguments["initial_state"]
        return arguments

    static = token(0)
    state = torch.zeros(2, 4, 32, 32, device="cuda")
    step("simple_gla", static, state)
    state.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step("simple_gla", static, state)
    expected = torch.zeros_like(state)
    for n in range(4):
        fresh = token(n)
        for x, y in zip(leaves(static), leaves(fresh), strict=True):
            x.copy_(y)
        graph.replay()
        fresh |= {"initial_state": expected, "output_final_state": True}
        right, expected = holdfast.simple_gla(**fresh, backend="chunked")
        assert relative_error(o.double(), right.double()) <= 1e-5
        assert relative_error(state.double(), expected.double()) <= 1e-5


def test_a_captured_graph_decodes_an_mlstm_on_its_states():
    draw = Draw(0, torch.bfloat16, "cuda")
    arguments = RECURRENCES["mlstm"].example(draw, Sizes(B=3, T=1, H=4, Hq=2, K=64, V=48))
    expected = arguments.pop("initial_state")
    held = tuple(x.clone() for x in expected)
    step("mlstm", arguments, tuple(x.clone() for x in held))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step("mlstm", arguments, held)
    # capturing runs nothing
    for _ in range(3):
        graph.replay()
        right, expected = holdfast.mlstm(
            **arguments, initial_state=expected, output_final_state=True, backend="chunked"
        )
        assert relative_error(o.double(), right.double()) <= 2.0**-7
        assert all(relative_error(x, y) <= 1e-5 for x, y in zip(held, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mlstm_gates(dtype):
    mlstm_gates_parity.check(B=2, T=3000, H=5, dtype=dtype, device="cuda")
    mlstm_gates_parity.check(B=1, T=1300, H=5, packed=(0, 0, 5, 700, 1300), dtype=dtype, device="cuda")
    mlstm_gates_parity.check(B=2, T=700, H=5, dtype=dtype, exponential=False, device="cuda")
    mlstm_gates_parity.check(B=1, T=131072, H=4, dtype=dtype, device="cuda")
    mlstm_gates_parity.check(B=1, T=300, H=1, packed=(0, 300), dtype=dtype, device="cuda")
    mlstm_gates_parity.equal_arguments_share_the_gradient("cuda")
    mlstm_gates_parity.nan_shows(3000, "cuda")
    mlstm_gates_parity.nan_stays_in_its_sequence("cuda")
    mlstm_gates_parity.nan_passes_no_end_within_a_tile("cuda")


def test_mlstm_gates_repeat_their_bits():
    i, f, *cotangents = (torch.randn(2, 3000, 5, device="cuda") for _ in range(5))

    def run():
        found = mlstm_gates_parity.kernel.forward(i, f, None, None, True)
        given = mlstm_gates_parity.kernel.Cotangents(*cotangents, None)
        return *found, *mlstm_gates_parity.kernel.backward(i, f, None, None, True, *found[:2], given)[:2]

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))
