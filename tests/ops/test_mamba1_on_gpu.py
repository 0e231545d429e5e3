"""mamba1's Triton kernels on a GPU: every dtype and size against float64, and the same bits in every run."""

import pytest
import torch

import holdfast
from holdfast.kernels.selective.triton.backend import TritonSelective
from holdfast.nn import CapturedStep, Mamba
from holdfast.planner import Device, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from kernels.selective.triton import parity as kernels
from parity import assert_close, cast, op_and_oracle, relative_error, values_and_grads

pytestmark = pytest.mark.gpu

MAMBA1 = RECURRENCES["mamba1"]
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def example(dtype=torch.float32, **sizes):
    return MAMBA1.example(Draw(0, dtype, "cuda"), Sizes(**sizes))


@every_dtype
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("how", ["whole", "packed", "groups"])
def test_the_kernels_match_the_oracle(dtype, block, how):
    packed = [0, 0, 3, 190, 207, 300, 300] if how == "packed" else None
    # the backward pass takes 32 channels a block
    which = kernels.plan(16, block, 4, 4)
    groups = 3 if how == "groups" else None
    run = kernels.check if block == 32 else kernels.check_forward
    run(dtype, 300, which, packed=packed, groups=groups, channels=99, numbers=16, device="cuda")


@every_dtype
@pytest.mark.parametrize("numbers", [1, 3, 16, 17, 64, 256])
def test_any_state(dtype, numbers):
    kernels.check(dtype, 50, kernels.plan(16, 32, 4, 4), channels=40, numbers=numbers, device="cuda")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 1000])
@pytest.mark.parametrize("channels", [1, 31, 32, 130])
def test_any_length_and_width(length, channels):
    arguments = example(B=3, T=length, D=channels, N=5)
    assert_close(*op_and_oracle(holdfast.mamba1, MAMBA1, arguments, backend="triton"), 2e-5)


@pytest.mark.parametrize("left_out", [("D",), ("z",), ("dt_bias",), ("initial_state",), ("D", "z", "dt_bias")])
def test_what_may_be_left_out(left_out):
    kernels.check("float32", 40, kernels.plan(16, 32, 4, 4), left_out=left_out, channels=40, device="cuda")


@every_dtype
def test_half_precision_errs_at_most_twice_as_much_as_the_step_loop(dtype):
    arguments = example(getattr(torch, dtype), B=2, T=300, D=64)
    got, exact = op_and_oracle(holdfast.mamba1, MAMBA1, arguments, backend="triton")
    plain = values_and_grads(lambda a: oracle(MAMBA1, a), arguments)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 2e-5 * (dtype == "float32") + 1e-6


@pytest.mark.parametrize("rate", [0.0, 1e2, 1e5])
def test_decay_of_any_strength(rate):
    arguments = example(T=200, D=64)
    arguments["A"] = arguments["A"] * rate
    assert_close(*op_and_oracle(holdfast.mamba1, MAMBA1, arguments, backend="triton"), 2e-5)


@every_dtype
@pytest.mark.parametrize("packed", [False, True])
def test_repeats_are_equal_bit_for_bit(dtype, packed):
    arguments = example(getattr(torch, dtype), B=1 if packed else 4, T=500, D=200)
    offsets = torch.tensor([0, 70, 70, 500], device="cuda") if packed else None
    if packed:
        arguments["initial_state"] = Draw(1, device="cuda").state(3, 200, 16)

    def run(a):
        return holdfast.mamba1(**a, dt_softplus=True, output_final_state=True, cu_seqlens=offsets, backend="triton")

    first = values_and_grads(run, arguments)
    for _ in range(5):
        assert all(map(torch.equal, first, values_and_grads(run, arguments)))


def test_without_gradients_the_results_are_the_same_bits():
    arguments = example(torch.bfloat16, T=100, D=70)
    with torch.no_grad():
        plain = holdfast.mamba1(**arguments, output_final_state=True, backend="triton")
    arguments["x"].requires_grad_()
    assert all(map(torch.equal, plain, holdfast.mamba1(**arguments, output_final_state=True, backend="triton")))


def test_a_token_of_x_in_a_wider_projection_is_read_where_it_lies():
    arguments = example(torch.bfloat16, T=40, D=64)
    right = holdfast.mamba1(**arguments, backend="triton")[0]
    wide = torch.cat([arguments[name] for name in ("x", "z", "B", "C")], -1)
    x, z, B, C = wide.split([64, 64, 16, 16], -1)
    assert torch.equal(holdfast.mamba1(**arguments | {"x": x, "z": z, "B": B, "C": C}, backend="triton")[0], right)


def test_steps_in_place_are_a_sequence():
    arguments = example(torch.bfloat16, T=9, D=64)
    y, final = holdfast.mamba1(**arguments, dt_softplus=True, output_final_state=True, backend="triton")
    state, outputs = arguments.pop("initial_state").clone(), []
    for t in range(9):
        token = {name: x[:, t : t + 1] if name in ("x", "dt", "B", "C", "z") else x for name, x in arguments.items()}
        outputs.append(holdfast.step("mamba1", token | {"dt_softplus": True}, state, "triton"))
    assert_close([torch.cat(outputs, 1).double(), state.double()], [y.double(), final.double()], 2.0**-8)


def test_a_captured_graph_decodes_with_mamba():
    torch.manual_seed(0)
    mixer, x = Mamba(64).cuda().requires_grad_(False), torch.randn(2, 12, 64, device="cuda")
    whole, _ = mixer(x)
    _, state = mixer(x[:, :8])
    step = CapturedStep(mixer, x[:, 8:9], state=state)
    outputs = [step(x[:, t : t + 1]).clone() for t in range(8, 12)]
    assert relative_error(torch.cat(outputs, 1).double(), whole[:, 8:].double()) <= 1e-5


def test_the_planner_chooses_the_kernels():
    sizes = (("B", 8), ("T", 2048), ("D", 1536), ("N", 16), ("G", 1))
    problem = Problem("mamba1", "selective", "bfloat16", sizes, frozenset({"gate", "needs_grad"}))
    assert TritonSelective().reject(problem, Device.named("h200")) is None
    arguments = cast(example(T=20), torch.bfloat16) | {"initial_state": None}
    assert (
        relative_error(holdfast.mamba1(**arguments)[0].double(), oracle(MAMBA1, cast(arguments, torch.float64))[0])
        < 2.0**-7
    )
