"""gated_rms_norm against its equation, as a custom op, and its errors."""

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.kernels.backend import describe
from holdfast.kernels.norm.triton.backend import TritonGatedNorm
from holdfast.ops.gated_rms_norm import problem
from holdfast.recurrences import Draw
from kernels.norm.triton import parity as gated_norm_parity
from parity import assert_close, cast, relative_error, values_and_grads


def arguments(dtype=torch.float64, weight=(3, 8), gate=True, device="cpu", T=5, D=8):
    draw = Draw(0, dtype, device)
    given = {"o": draw.normal(2, T, 3, D), "weight": 1 + 0.1 * draw.normal(*weight) if weight else None}
    # as a projection leaves it: part of a wider tensor
    return given | {"gate": draw.normal(2, T, 6, D)[:, :, ::2] if gate else None}


def equation(a, eps=1e-5, activation="silu", center=False):
    o = a["o"] - a["o"].mean(-1, keepdim=True) if center else a["o"]
    y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    if a["weight"] is not None:
        y = y * a["weight"]
    if a["gate"] is not None:
        y = y * (F.silu if activation == "silu" else torch.sigmoid)(a["gate"])
    return y


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("weight", [(3, 8), (8,), None])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_against_the_equation(center, weight, gate, activation):
    given, options = arguments(weight=weight, gate=gate), {"activation": activation, "eps": 1e-3, "center": center}
    got = values_and_grads(lambda a: holdfast.gated_rms_norm(**a, **options), given)
    assert_close(got, values_and_grads(lambda a: equation(a, **options), given), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_come_in_the_inputs_dtype(dtype):
    given = arguments(dtype) | {"weight": torch.ones(8)}
    got = values_and_grads(lambda a: holdfast.gated_rms_norm(**a), given)
    exact = values_and_grads(equation, cast(given, torch.float64))
    assert holdfast.gated_rms_norm(**given).dtype == dtype
    assert_close(got, exact, 1e-6 if dtype == torch.float32 else 2.0**-8)


def test_no_steps():
    given = arguments(T=0)
    y, *grads = values_and_grads(lambda a: holdfast.gated_rms_norm(**a), given)
    assert y.shape == (2, 0, 3, 8)
    assert grads[1].eq(0).all()


def test_opcheck():
    given = {name: x.float().requires_grad_() for name, x in arguments().items()}
    forward = torch.ops.holdfast.gated_norm_forward.default
    torch.library.opcheck(forward, (given["o"], given["gate"], given["weight"], 1e-5, "silu", False, True, ""))
    y = torch.randn(2, 5, 3, 8)
    tensors = (x.detach() for x in (given["o"], given["gate"], given["weight"]))
    torch.library.opcheck(torch.ops.holdfast.gated_norm_backward.default, (y, *tensors, 1e-5, "silu", True, ""))


def test_compiles_as_one_graph():
    given = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(holdfast.gated_rms_norm, fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: holdfast.gated_rms_norm(**a), given)
    assert_close(values_and_grads(lambda a: compiled(**a), given), eager, 1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate": torch.ones(2, 5, 3, 7).double()}, ValueError, "gate: expected shape"),
        ({"weight": torch.ones(2, 8)}, ValueError, "weight: expected shape"),
        ({"gate": torch.ones(2, 5, 3, 8)}, TypeError, "gate: expected torch.float64"),
        ({"activation": "relu"}, ValueError, "activation: expected 'silu' or 'sigmoid'; got 'relu'"),
        ({"center": 1}, TypeError, "center: expected"),
        ({"backend": "triton"}, ValueError, "it needs an NVIDIA GPU"),
        ({"backend": "hopper"}, ValueError, "expected one of 'triton', 'pytorch'"),
        ({"o": None}, TypeError, "o: expected a tensor"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        holdfast.gated_rms_norm(**arguments() | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("weights", "D", "T"), [(1, 128, 700), (3, 80, 700), (0, 64, 1), (1, 4096, 65)])
def test_on_a_gpu(weights, D, T, dtype):
    call = gated_norm_parity.example(B=2, T=T, H=3, D=D, dtype=dtype, weights=weights, device="cuda")
    device = describe(torch.device("cuda", 0))
    # one plan of both passes: the rows and warps of the backward pass serve the forward pass too
    plan = TritonGatedNorm().candidates(problem(call, True), device, "backward")[0].plan
    gated_norm_parity.check(call, plan)
    gated_norm_parity.check(call._replace(gate=None, activation="sigmoid", center=True), plan)
    planned = holdfast.gated_rms_norm(call.o, call.gate, None, backend="triton")
    assert relative_error(planned, holdfast.gated_rms_norm(call.o, call.gate, None, backend="pytorch")) <= 2.0**-8


@pytest.mark.gpu
def test_on_a_gpu_repeats_bit_for_bit_and_is_captured():
    call = gated_norm_parity.example(B=2, T=900, H=4, D=128, weights=4, dtype=torch.bfloat16, device="cuda")
    given = {"o": call.o, "gate": call.gate, "weight": call.weight}
    first, second = (values_and_grads(lambda a: holdfast.gated_rms_norm(**a), given) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = holdfast.gated_rms_norm(**given)
    call.o.mul_(-1)
    graph.replay()
    assert torch.equal(y, holdfast.gated_rms_norm(**given))
