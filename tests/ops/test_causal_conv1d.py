"""causal_conv1d against torch's convolution, in pieces, packed, as a custom op; its steps of decoding; its errors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.kernels.backend import describe
from holdfast.kernels.conv.triton.backend import TritonConv
from holdfast.ops.causal_conv1d import problem
from holdfast.planner.models.conv.triton import candidates
from holdfast.recurrences import Draw
from kernels.conv.triton import parity as conv_parity
from parity import assert_close, cast, relative_error, values_and_grads


def arguments(dtype=torch.float64, B=2, T=11, D=6, W=4, N=None, device="cpu"):
    draw = Draw(0, dtype, device)
    # as a projection leaves it: part of a wider tensor
    given = {"x": draw.normal(B, T, 2 * D)[..., D:], "weight": draw.normal(D, W, scale=W**-0.5)}
    return given | {"bias": draw.normal(D), "initial_state": draw.state(N or B, W - 1, D)}


def run(a, **options):
    return holdfast.causal_conv1d(**a, output_final_state=True, **options)


def by_torch(a, activation):
    rows = torch.cat([a["initial_state"], a["x"]], 1)
    y = F.conv1d(rows.mT, a["weight"][:, None], a["bias"], groups=rows.shape[2]).mT
    before = a["weight"].shape[1] - 1
    return F.silu(y) if activation else y, rows[:, rows.shape[1] - before :]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("W", [1, 2, 4, 9])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_equals_torchs_convolution(T, W, activation):
    given = arguments(T=T, W=W)
    got = values_and_grads(lambda a: run(a, activation=activation), given)
    assert_close(got, values_and_grads(lambda a: by_torch(a, activation), given), 1e-12)


def test_gradients_by_differences():
    given = arguments(B=1, T=5, D=2)
    tensors = [x.requires_grad_() for x in given.values()]
    named = tuple(given)
    assert torch.autograd.gradcheck(lambda *x: run(dict(zip(named, x, strict=True)), activation="silu"), tensors)


def test_without_bias_and_state():
    given = arguments()
    zeros = given | {"bias": torch.zeros(6).double(), "initial_state": torch.zeros(2, 3, 6).double()}
    y, final = holdfast.causal_conv1d(given["x"], given["weight"])
    assert final is None
    assert torch.equal(y, holdfast.causal_conv1d(**zeros)[0])


def test_in_pieces():
    given = arguments()
    whole, last = run(given, activation="silu")
    parts, state = [], given["initial_state"]
    for piece in given["x"].split((1, 0, 6, 2, 2), 1):
        y, state = run(given | {"x": piece, "initial_state": state}, activation="silu")
        parts.append(y)
    assert_close([torch.cat(parts, 1)], [whole], 1e-12)
    assert torch.equal(state, last)


@pytest.mark.parametrize("lengths", [(5, 1, 0, 2, 9), (1,), (0, 1), (0,), (3, 0)])
def test_packed_sequences_are_calls_of_their_own(lengths):
    given = arguments(B=1, T=sum(lengths), N=len(lengths))
    offsets = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)

    def apart(a):
        parts = [
            run(a | {"x": x, "initial_state": state})
            for x, state in zip(a["x"].split(lengths, 1), a["initial_state"].split(1), strict=True)
        ]
        return torch.cat([y for y, _ in parts], 1), torch.cat([final for _, final in parts])

    got = values_and_grads(lambda a: run(a, cu_seqlens=offsets), given)
    assert_close(got, values_and_grads(apart, given), 1e-12)


def test_no_sequence_sees_another():
    given, offsets = arguments(B=1, N=3), torch.tensor([0, 3, 8, 11])
    clean = run(given, cu_seqlens=offsets, activation="silu")
    x, state = given["x"].clone(), given["initial_state"].clone()
    x[:, :3], x[:, 8:], state[::2] = torch.nan, torch.nan, torch.nan
    x.requires_grad_()
    y, final = run(given | {"x": x, "initial_state": state}, cu_seqlens=offsets, activation="silu")
    assert torch.equal(y[:, 3:8], clean[0][:, 3:8])
    assert torch.equal(final[1], clean[1][1])
    assert y[:, :3].isnan().all()
    (grad,) = torch.autograd.grad(y[:, 3:8].sum(), x)
    assert grad[:, 3:8].isfinite().all()
    assert grad[:, 3:8].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_come_in_the_inputs_dtype(dtype):
    # weights in float32, as parameters are
    given = arguments(dtype) | cast({name: arguments()[name] for name in ("weight", "bias")}, torch.float32)
    y, final = run(given)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    exact = values_and_grads(run, cast(given, torch.float64))
    assert_close(values_and_grads(run, given), exact, 1e-6 if dtype == torch.float32 else 2.0**-8)


def test_autocast_leaves_weights_as_they_are():
    given = cast(arguments(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, final = run(given)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, run(given | {"x": given["x"].bfloat16()})[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("W", [1, 4])
def test_decoding_is_the_forward_pass_by_tokens(W, dtype):
    given = arguments(dtype, W=W)
    whole, last = run(given, activation="silu")
    state = given["initial_state"].clone()
    options = given["weight"], given["bias"], "silu"
    parts = [holdfast.causal_conv1d_update(x, state, *options) for x in given["x"].split((1, 2, 1, 7), 1)]
    # PyTorch's silu of a vector and of a number may differ in the last bit
    assert_close([torch.cat(parts, 1).double()], [whole.double()], 2.0**-8 if dtype == torch.bfloat16 else 1e-12)
    assert torch.equal(state, last)
    state = given["initial_state"].clone()
    one = holdfast.causal_conv1d_update(given["x"][:, 0], state, *options)
    assert torch.equal(one[:, None], parts[0])


def test_a_state_may_be_a_part_of_a_wider_one_in_any_dtype():
    given, held = arguments(torch.bfloat16), torch.zeros(2, 5, 10, dtype=torch.bfloat16)
    y = holdfast.causal_conv1d_update(given["x"], held[:, 1:4, 2:8], given["weight"])
    assert relative_error(y, holdfast.causal_conv1d(given["x"], given["weight"])[0]) <= 2.0**-8
    assert torch.equal(held[:, 1:4, 2:8], given["x"][:, -3:])
    assert held[:, 0].eq(0).all()
    assert held[:, 4].eq(0).all()


def _index(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_in_a_pool(dtype):
    given = arguments(torch.float32)
    pool = torch.randn(5, 3, 6).to(dtype)
    before, options = pool.clone(), (given["weight"], given["bias"], "silu")
    held = pool[[4, 0]].clone()
    right = torch.stack([holdfast.causal_conv1d_update(x, held, *options) for x in given["x"].unbind(1)], 1)
    y = holdfast.causal_conv1d_update(given["x"], pool, *options, slots=_index(4, 0))
    assert torch.equal(y, right)
    assert torch.equal(pool[[4, 0]], held)
    assert torch.equal(pool[1:4], before[1:4])


def test_decoding_in_a_pool_with_padding_and_tokens_taken_back():
    given = arguments(torch.float32)
    pool = torch.randn(5, 3, 6)
    before, options = pool.clone(), (given["weight"], given["bias"])
    update = partial(holdfast.causal_conv1d_update, given["x"], pool, *options)
    y = update(slots=_index(-1, 2), next_slots=_index(1, 5))
    assert not y[0].any()
    assert y[1].any()
    assert torch.equal(pool, before)
    update(slots=_index(4, 0), next_slots=_index(1, 0), accepted=_index(0, 2))
    assert torch.equal(pool[1], before[4])
    assert torch.equal(pool[0], torch.cat([before[0], given["x"][1, :2]])[-3:])
    assert torch.equal(pool[2:], before[2:])
    places = torch.full((2, 11), -1, dtype=torch.int32)
    places[0, 10] = 3
    update(slots=_index(4, 0), next_slots=places)
    assert torch.equal(pool[3], given["x"][0, -3:])
    assert torch.equal(pool[4], before[4])
    held = pool.clone()
    one = holdfast.causal_conv1d_update(given["x"][:, 0], pool, *options, slots=_index(-1, 1))
    assert one.shape == (2, 6)
    assert torch.equal(pool[1], torch.cat([held[1], given["x"][1, :1]])[-3:])


def test_what_a_pool_does_not_take():
    given, pool = arguments(torch.float32), torch.randn(5, 3, 6)
    update = partial(holdfast.causal_conv1d_update, given["x"], pool, given["weight"])
    with pytest.raises(TypeError, match="slots: expected a tensor beside next_slots and accepted; got None"):
        update(next_slots=_index(0, 1))
    with pytest.raises(TypeError, match=r"slots: expected torch.int32; got torch.int64"):
        update(slots=_index(0, 1).long())
    with pytest.raises(ValueError, match=r"conv_state: expected shape \[slots, W-1=3, D=6\]"):
        holdfast.causal_conv1d_update(given["x"], pool[:, 1:], given["weight"], slots=_index(0, 1))


def test_no_steps():
    given = arguments(T=0)
    y, final, *grads = values_and_grads(run, given)
    assert y.shape == (2, 0, 6)
    assert torch.equal(final, given["initial_state"].double())
    assert grads[1].eq(0).all()
    # the state goes through
    assert grads[3].ne(0).all()


def test_opcheck():
    given = {name: x.float().requires_grad_() for name, x in arguments().items()}
    rest = "silu", None, True, True, ""
    torch.library.opcheck(torch.ops.holdfast.conv_forward.default, (*given.values(), *rest))
    tensors = [x.detach() for x in given.values()]
    grads = torch.randn(2, 11, 6), torch.randn(2, 3, 6)
    torch.library.opcheck(torch.ops.holdfast.conv_backward.default, (*grads, *tensors, "silu", None, ""))
    x, weight, bias, state = tensors
    update = torch.ops.holdfast.conv_update.default
    torch.library.opcheck(update, (x, weight, bias, state, None, None, None, "silu", ""))
    read, accepted = torch.tensor([[1, 0], [3, 11]], dtype=torch.int32)
    torch.library.opcheck(update, (x, weight, bias, state, read, read, accepted, "silu", ""))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(packed):
    given = arguments(B=1, N=2) if packed else arguments()
    options = {"activation": "silu"} | ({"cu_seqlens": torch.tensor([0, 4, 11])} if packed else {})
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: run(a, **options), fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: run(a, **options), given)
    assert_close(values_and_grads(compiled, given), eager, 1e-12)


def test_decoding_compiles_as_one_graph():
    given = arguments()
    state, other = given["initial_state"].clone(), given["initial_state"].clone()
    torch._dynamo.reset()
    compiled = torch.compile(holdfast.causal_conv1d_update, fullgraph=True, backend="aot_eager")
    y = compiled(given["x"], state, given["weight"])
    assert torch.equal(y, holdfast.causal_conv1d_update(given["x"], other, given["weight"]))
    assert torch.equal(state, other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 11).double()}, ValueError, "x: expected shape"),
        ({"weight": torch.ones(5, 4)}, ValueError, "weight: expected shape"),
        ({"weight": torch.ones(6, 0)}, ValueError, "weight: expected W > 0"),
        ({"weight": torch.ones(6)}, ValueError, "weight: expected shape"),
        ({"bias": torch.ones(7)}, ValueError, "bias: expected shape"),
        ({"initial_state": torch.ones(2, 4, 6).double()}, ValueError, r"initial_state: expected shape .*W-1=3"),
        ({"initial_state": torch.ones(2, 3, 6)}, TypeError, "initial_state: expected torch.float64"),
        ({"activation": "relu"}, ValueError, "activation: expected 'silu' or None; got 'relu'"),
        ({"cu_seqlens": torch.tensor([0, 11])}, ValueError, "cu_seqlens: expected packed inputs with B = 1"),
        ({"output_final_state": 1}, TypeError, "output_final_state"),
        ({"backend": "triton"}, ValueError, "it needs an NVIDIA GPU"),
        ({"backend": "hopper"}, ValueError, "expected one of 'triton', 'pytorch'"),
        ({"x": None}, TypeError, "x: expected a tensor"),
        ({"weight": None}, TypeError, "weight: expected a tensor"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        holdfast.causal_conv1d(**arguments() | change)


@pytest.mark.parametrize("offsets", [[0, 12], [1, 11], [0, 7, 5, 11]])
def test_offsets_are_checked(offsets):
    given = arguments(B=1, N=len(offsets) - 1)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        holdfast.causal_conv1d(**given, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(2, 2, 6), ValueError, "conv_state: expected shape"),
        (torch.zeros(2, 3, 6, dtype=torch.int64), TypeError, "conv_state: expected a floating-point dtype"),
        (torch.zeros(2, 6, 3).mT, ValueError, "conv_state: expected channels side by side"),
        (None, TypeError, "conv_state: expected a tensor"),
    ],
)
def test_errors_name_the_state(state, error, message):
    given = arguments()
    with pytest.raises(error, match=message):
        holdfast.causal_conv1d_update(given["x"], state, given["weight"])


SHAPES = (
    {"B": 2, "T": 700, "D": 384},
    {"B": 3, "T": 1, "D": 64},
    {"T": 333, "D": 13, "W": 3},
    {"T": 129, "D": 40, "W": 16},
    {"D": 96, "lengths": (5, 1, 0, 7, 900, 0, 2)},
    {"D": 64, "lengths": (1,) * 300, "bias": False, "state": False},
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu(shape, dtype):
    call, offsets = conv_parity.example(**shape, dtype=dtype, device="cuda")
    device, what = describe(torch.device("cuda", 0)), problem(call, offsets, True)
    for direction in ("forward", "backward"):
        for candidate in (candidates(what, device, direction)[0], candidates(what, device, direction)[-1]):
            conv_parity.check(call, offsets, candidate.plan)
    assert TritonConv().reject(what, device) is None


@pytest.mark.gpu
def test_on_a_gpu_no_sequence_sees_another():
    conv_parity.apart("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_on_a_gpu_decoding_is_the_forward_pass(state):
    call, _ = conv_parity.example(T=40, D=300, state=False, dtype=torch.bfloat16, device="cuda")
    conv_parity.decoded(call, torch.randn(2, 3, 300, device="cuda").to(state))
    conv_parity.decoded_in_a_pool(call, state)


@pytest.mark.gpu
def test_on_a_gpu_repeats_bit_for_bit_and_is_captured():
    given = arguments(torch.bfloat16, T=900, D=128, device="cuda")
    first, second, third = (values_and_grads(lambda a: run(a, activation="silu"), given) for _ in range(3))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, second, third, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y, _ = run(given)
    given["x"].mul_(-1)
    graph.replay()
    assert relative_error(y, run(given)[0]) == 0


@pytest.mark.gpu
def test_on_a_gpu_a_graph_decodes_in_place():
    given = arguments(torch.bfloat16, B=3, T=12, D=64, device="cuda")
    whole, last = run(given, activation="silu")
    state, token = given["initial_state"].clone(), given["x"][:, :1].clone()
    held = state.clone()
    for _ in range(3):
        holdfast.causal_conv1d_update(token, state, given["weight"], given["bias"], "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = holdfast.causal_conv1d_update(token, state, given["weight"], given["bias"], "silu")
    state.copy_(held)
    for t in range(12):
        token.copy_(given["x"][:, t : t + 1])
        graph.replay()
        assert torch.equal(y[:, 0], whole[:, t])
    assert torch.equal(state, last)
