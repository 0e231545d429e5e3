"""KDA on an NVIDIA GPU: right at every size, dtype and decay, whichever kernels take the additive gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.recurrences import RECURRENCES
from holdfast.recurrences.example import Draw, Sizes
from parity import relative_error

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
USUAL = {"H": 4, "Hq": 4, "K": 64, "V": 64, "dtype": torch.bfloat16}
PACKED = (0, 0, 1, 64, 300, 1000, 1000)
# an erase key that reads the state before the decay
BEFORE = USUAL | {"Hq": 2, "erase_heads": 2, "before": True}
# name -> (arguments of parity.example, offsets, whether a gradient comes through the final state)
CASES = {
    "bfloat16": ({"B": 2, "T": 1000} | USUAL, None, True),
    "one token": ({"B": 2, "T": 1} | USUAL, None, True),
    "float16": ({"B": 2, "T": 1000} | USUAL | {"dtype": torch.float16}, None, True),
    "float32": ({"B": 2, "T": 1000} | USUAL | {"dtype": torch.float32}, None, True),
    "128 columns": ({"T": 4095, "g": "weak"} | USUAL | {"K": 128, "V": 128}, None, True),
    "narrow, grouped": ({"T": 300} | USUAL | {"Hq": 2, "K": 24, "V": 40}, None, True),
    "an erase key": ({"T": 300} | USUAL | {"Hq": 2, "erase_heads": 4}, None, True),
    "before the decay": ({"T": 4095} | BEFORE | {"K": 128, "V": 128}, None, True),
    "before a decay a head": ({"T": 4095, "by_head": True} | BEFORE | {"K": 128, "V": 128}, None, True),
    "before the decay, float32": ({"T": 300} | BEFORE | {"K": 24, "V": 40, "dtype": torch.float32}, None, True),
    "before the decay, packed": ({"T": 1000} | BEFORE, PACKED, True),
    "before strong decays": ({"T": 1000, "g": "strong"} | BEFORE, None, True),
    "before decays by channels": ({"T": 1000, "g": "channels"} | BEFORE, None, True),
    "wide": ({"T": 300} | USUAL | {"H": 2, "Hq": 1, "K": 256, "V": 192}, None, True),
    "packed": ({"T": 1000} | USUAL, PACKED, True),
    "strong decays": ({"T": 1000, "g": "strong", "state": False} | USUAL, None, False),
    "channels": ({"T": 1000, "g": "channels"} | USUAL, None, True),
    "keys alike": ({"T": 1000, "g": "weak", "keys": "alike"} | USUAL, None, True),
}


@pytest.fixture(scope="module")
def found():
    """name -> a child process that prints the case's errors: they compile side by side."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    children = {}
    for name, case in CASES.items():
        code = f"import torch\nfrom kernels.matrix.vector_decay.triton.delta.parity import on_gpu\non_gpu(*{case!r})"
        children[name] = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield children
    for child in children.values():
        child.kill()


@pytest.mark.parametrize("name", CASES)
def test_parity(found, name):
    """Of outputs and gradients 6e-3 in bfloat16, of dg 8e-3; where keys are alike twice that."""
    printed, complaint = found[name].communicate(timeout=150)
    assert found[name].returncode == 0, complaint
    errors = json.loads(printed.splitlines()[-1])
    dtype = CASES[name][0]["dtype"]
    limit = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 2e-6}[dtype]
    limit *= 2 if name == "keys alike" else 1
    wrong = {key: mine for key, (mine, _) in errors.items() if mine > limit * (4 / 3 if key == "dg" else 1)}
    assert not wrong, errors


@pytest.mark.parametrize("op", ["comba", "rwkv7"])
def test_ops_that_read_before_the_decay(op):
    given = RECURRENCES[op].example(Draw(0, torch.bfloat16, "cuda"), Sizes(B=2, T=1000, H=4, Hq=2, K=64, V=64))
    leaves = {name: x.requires_grad_() for name, x in given.items()}

    def call(inputs, backend):
        o, state = getattr(holdfast, op)(**inputs, output_final_state=True, backend=backend)
        loss = o.double().square().sum() + state.double().square().sum()
        return [o, state, *torch.autograd.grad(loss, inputs.values())]

    exact = call({name: x.detach().double().requires_grad_() for name, x in leaves.items()}, "chunked")
    for x, right in zip(call(leaves, "triton"), exact, strict=True):
        assert relative_error(x.double(), right) <= 8e-3


def test_gates_repeats_and_graphs():
    """The bounded gate at its bound; the same numbers call after call, and in a CUDA graph."""
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    q, k, v, g, beta = (
        normal(2, 300, 4, 64),
        normal(2, 300, 4, 64),
        normal(2, 300, 8, 64),
        normal(2, 300, 8, 64),
        normal(2, 300, 8),
    )
    A_log, dt_bias = torch.full((8,), 2.0, device="cuda"), torch.full((8, 64), 3.0, device="cuda")
    given = [x.requires_grad_() for x in (q, k, v, g, beta, A_log, dt_bias)]

    def call(inputs, backend):
        o, _ = holdfast.kda(
            *inputs[:5], A_log=inputs[5], dt_bias=inputs[6], lower_bound=-5.0, qk_l2norm=True, beta_sigmoid=True,
            backend=backend,
        )  # fmt: skip
        return [o, *torch.autograd.grad(o.float().square().sum(), inputs)]

    # what it returns holds its graph, whose leaves wait for the stream that it was made on
    with torch.cuda.stream(torch.cuda.Stream()):
        first = call(given, "triton")
    torch.cuda.synchronize()
    exact = call([x.detach().double().requires_grad_() for x in given], "chunked")
    for x, right in zip(first, exact, strict=True):
        assert relative_error(x.double(), right) <= 8e-3
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            assert all(torch.equal(x, y) for x, y in zip(call(given, "triton"), first, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(given, "triton")
    with torch.no_grad():
        for x in captured:
            x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, first, strict=True))
