"""The vector-decay kernels on an NVIDIA GPU: right at every size, dtype and decay, safe to repeat and to capture."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import leaves, relative_error, values_and_grads, with_grad

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
USUAL = {"H": 4, "Hq": 4, "K": 64, "V": 64, "dtype": torch.bfloat16}
PACKED = (0, 0, 1, 64, 300, 1000, 1000)
# name -> (arguments of gla_parity.example, offsets, whether a gradient comes through the final state)
CASES = {
    "bfloat16": ({"B": 2, "T": 1000} | USUAL, None, True),
    "one token": ({"B": 2, "T": 1} | USUAL, None, True),
    "float16": ({"B": 2, "T": 1000} | USUAL | {"dtype": torch.float16}, None, True),
    "float32": ({"B": 2, "T": 1000} | USUAL | {"dtype": torch.float32}, None, True),
    "128 columns": ({"T": 4095, "g": "weak", "beta": False} | USUAL | {"K": 128, "V": 128}, None, True),
    "128 columns, whole chunks": ({"T": 1024, "beta": False} | USUAL | {"K": 128, "V": 128}, None, True),
    "narrow, grouped": ({"T": 300} | USUAL | {"Hq": 2, "K": 24, "V": 40}, None, True),
    "16 x 256": ({"T": 300} | USUAL | {"K": 16, "V": 256}, None, True),
    "256 x 128, float32": ({"T": 300} | USUAL | {"K": 256, "V": 128, "dtype": torch.float32}, None, True),
    "packed": ({"T": 1000} | USUAL, PACKED, True),
    "channels that decay by -50": ({"T": 1000, "g": "channels"} | USUAL, None, True),
    "resets, decays in bfloat16": ({"T": 1000, "g": "resets", "decays": torch.bfloat16} | USUAL, None, True),
    # their gradient of the order of 1e-22 is right; rounding of one through the last state would drown it
    "decays of fifty": ({"T": 300, "g": "strong", "state": False} | USUAL, None, False),
    "131072 tokens": ({"T": 131072} | USUAL | {"H": 1, "Hq": 1}, None, True),
}
WIDE = {"B": 2, "H": 4, "Hq": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, "beta": False}
HOPPER = {
    "hopper": ({"T": 1000} | WIDE, None, True),
    "hopper, whole chunks": ({"T": 1024} | WIDE, None, True),
    "hopper, one token": ({"T": 1} | WIDE, None, True),
    "hopper, weak decays": ({"T": 4095, "g": "weak"} | WIDE | {"B": 1}, None, True),
    "hopper, float16": ({"T": 1000} | WIDE | {"dtype": torch.float16}, None, True),
    "hopper, 64 columns, whole chunks": ({"T": 960} | WIDE | {"K": 64, "V": 64}, None, True),
    "hopper, 64 and 128 columns": ({"T": 512} | WIDE | {"K": 64}, None, True),
    "hopper, narrow, grouped": ({"T": 300} | WIDE | {"Hq": 2, "K": 24, "V": 40}, None, True),
    "hopper, channels that decay by -50": ({"T": 1000, "g": "channels"} | WIDE, None, True),
    "hopper, resets, decays in bfloat16": ({"T": 1000, "g": "resets", "decays": torch.bfloat16} | WIDE, None, True),
    "hopper, decays of fifty": ({"T": 300, "g": "strong", "state": False} | WIDE, None, False),
    "hopper, packed": ({"T": 1000} | WIDE | {"B": 1}, PACKED, True),
    "hopper, strengths": ({"T": 1000} | WIDE | {"beta": True}, None, True),
    "hopper, packed, strengths, resets": ({"T": 1000, "g": "resets"} | WIDE | {"B": 1, "beta": True}, PACKED, True),
    "hopper, strengths, narrow, grouped": ({"T": 300} | WIDE | {"Hq": 2, "K": 24, "V": 40, "beta": True}, None, True),
    "hopper, 131072 tokens": ({"T": 131072} | WIDE | {"B": 1, "H": 1, "Hq": 1, "K": 64, "V": 64}, None, True),
}


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def ran(name):
    """The case's arguments, or a skip where it is for another GPU."""
    if name in HOPPER and not is_hopper():
        pytest.skip("it needs a GPU of compute capability 9.0")
    return (CASES | HOPPER)[name]


@pytest.fixture(params=["triton", "hopper"])
def backend(request):
    if request.param == "hopper" and not is_hopper():
        pytest.skip("it needs a GPU of compute capability 9.0")
    return request.param


def run(backend, a):
    return holdfast.gla(**a, output_final_state=True, backend=backend)


@pytest.fixture(scope="module")
def found():
    """name -> a child process that prints the case's errors: they compile side by side."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    children = {}
    for name, case in (CASES | (HOPPER if is_hopper() else {})).items():
        given = (*case, "hopper" if name in HOPPER else "triton")
        code = f"import torch\nfrom kernels.matrix.vector_decay.triton.parity import on_gpu\non_gpu(*{given!r})"
        children[name] = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield children
    for child in children.values():
        child.kill()


@pytest.mark.parametrize("name", CASES | HOPPER)
def test_parity(found, name):
    """At most twice the error of the PyTorch path in the same dtype.

    That path's products are in float32 whatever the dtype, so that its states and gates' gradients, which are float32,
    carry no rounding of operands: of those the bound is that of the output. In float32 the kernels' products are of
    three TF32 products each, exact to 2^-22 where float32 is to 2^-24: 1e-6 whatever that path's error. dg may have
    8e-3 in half precision, as where one decay serves a head.
    """
    half = ran(name)[0]["dtype"] != torch.float32
    printed, complaint = found[name].communicate(timeout=150)
    assert found[name].returncode == 0, complaint
    errors = json.loads(printed.splitlines()[-1])
    for each, (mine, theirs) in errors.items():
        floor = (8e-3 if each == "dg" else 0.0) if half else 1e-6
        assert mine <= max(2 * theirs, 2 * errors["o"][1], floor), (each, errors)


def arguments(**sizes):
    sizes = {"B": 2, "T": 130, "H": 4, "K": 64, "V": 64} | sizes
    return RECURRENCES["gla"].example(Draw(0, torch.bfloat16, device="cuda"), Sizes(**sizes))


def test_runs_repeat_bit_for_bit(backend):
    first, second = (values_and_grads(partial(run, backend), arguments()) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_it_is_chosen():
    few, many = arguments(B=1, T=4096, H=2), arguments(B=4, T=1024, H=32, K=128, V=128)
    for a, name in ((few, "triton"), (many, "hopper" if is_hopper() else "triton")):
        chosen, _ = holdfast.gla(**a)
        named, _ = holdfast.gla(**a, backend=name)
        assert torch.equal(chosen, named), name


@pytest.mark.parametrize("backend", ["hopper", "triton", ""])
def test_opcheck(backend):
    if backend == "hopper" and not is_hopper():
        pytest.skip("it needs a GPU of compute capability 9.0")
    call, _ = RECURRENCES["gla"].map(**with_grad(arguments()))
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, (*call, None, "gla", True, backend))


def test_states_that_a_forward_pass_keeps_are_those_that_it_would_find_again():
    if not is_hopper():
        pytest.skip("it needs a GPU of compute capability 9.0")
    call, _ = RECURRENCES["gla"].map(**arguments(T=1000, K=128, V=128))
    o, state, kept = torch.ops.holdfast.matrix_forward(*call, None, "gla", True, "hopper")
    assert kept.numel() == 2 * 16 * 4 * 128 * 128
    given = (torch.ones_like(o), torch.ones_like(state), *call, None, "gla", "hopper")
    first, second, alone = (torch.ops.holdfast.matrix_backward(*given, *with_) for with_ in ((o, kept), (o, kept), ()))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first, alone, strict=True))


def test_permuted_inputs(backend):
    a, same = arguments(), partial(run, backend)
    apart = {name: x.movedim(1, 2).contiguous().movedim(2, 1) if x.dim() == 4 else x for name, x in a.items()}
    assert all(torch.equal(x, y) for x, y in zip(values_and_grads(same, a), values_and_grads(same, apart), strict=True))


def test_compiles_as_one_graph(backend):
    a = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(holdfast.gla, fullgraph=True, backend="aot_eager")
    eager = values_and_grads(partial(run, backend), a)
    graph = values_and_grads(lambda b: compiled(**b, output_final_state=True, backend=backend), a)
    assert all(relative_error(x, y) <= 1e-6 for x, y in zip(graph, eager, strict=True))


def test_a_captured_graph(backend):
    a = with_grad(arguments())

    def both():
        o, state = run(backend, a)
        return [o, state, *torch.autograd.grad([o, state], leaves(a), [torch.ones_like(o), torch.ones_like(state)])]

    # what it returns holds its graph, whose leaves wait for the stream that it was made on
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    for _ in range(2):
        with torch.no_grad():
            for x in found:
                x.zero_()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def vector_ssd(dtype):
    a = RECURRENCES["ssd"].example(Draw(0, dtype, device="cuda"), Sizes(B=1, T=130, H=4, Hq=2, K=64, V=64))
    return a | {"A": a["A"][:, None] * torch.rand(4, 64, device="cuda")}


def test_a_vector_decay_in_ssd():
    a = vector_ssd(torch.float32)
    mine = values_and_grads(lambda b: holdfast.ssd(**b, output_final_state=True, backend="triton"), a)
    theirs = values_and_grads(lambda b: holdfast.ssd(**b, output_final_state=True, backend="chunked"), a)
    assert all(relative_error(x.double(), y.double()) <= 5e-6 for x, y in zip(mine, theirs, strict=True))


def test_a_vector_decay_in_ssd_on_hopper():
    if not is_hopper():
        pytest.skip("it needs a GPU of compute capability 9.0")

    def found(a, backend):
        return values_and_grads(lambda b: holdfast.ssd(**b, output_final_state=True, backend=backend), a)

    a = vector_ssd(torch.bfloat16)
    mine = found(a, "hopper")
    right = found({name: x.double() for name, x in a.items()}, "chunked")
    assert all(relative_error(x.double(), y) <= 8e-3 for x, y in zip(mine, right, strict=True))
