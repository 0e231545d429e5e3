"""Mixers whose recurrence and what stands around it are one op, against the same mixers in parts."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from fused_on_cpu import fused_on_cpu
from holdfast.nn import MLSTM, RGLRU, RetNet, RotLRU
from holdfast.ops.lru_layer import lru_layer
from holdfast.ops.retention_layer import retention_layer
from parity import relative_error
from test_strides import Compared

MIXERS = {
    "RetNet": partial(RetNet, 24, 3, expand_k=0.5, expand_v=1.0),
    "RGLRU": partial(RGLRU, 24),
    "RGLRU, heads": partial(RGLRU, 24, 3, expand=1.5),
    "RotLRU": partial(RotLRU, 24),
    "RotLRU, heads": partial(RotLRU, 24, 2),
    "MLSTM": partial(MLSTM, 24, 3, gate_soft_cap=2.0, input_gate_bias=0.5),
    "MLSTM, no cap": partial(MLSTM, 24, 2, expand_k=1.0, gate_soft_cap=None, input_gate_bias=0.5),
    "MLSTM, sigmoid": partial(MLSTM, 24, 2, gating="sigmoid", input_gate_bias=0.5),
    "MLSTM, unnormalised": partial(MLSTM, 24, 2, gating="sigmoid", normalize=False, input_gate_bias=0.5),
}
mixers = pytest.mark.parametrize("name", MIXERS)
PACKED = (0, 0, 3, 4, 11)


def made(name, dtype=torch.float64):
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    with torch.no_grad():
        for x in mixer.parameters():
            x += 0.1 * torch.randn_like(x)
    return mixer.to(dtype)


def apart(mixer):
    """The mixer, with another op in its own's place, as holdfast.parallel has it."""
    own = type(mixer).op
    mixer.op = lambda *given, **named: own(*given, **named)
    return mixer


def inputs(mixer, packed, state, length=11, batch=2, device="cpu"):
    """(x, state, cu_seqlens); x and the state's floats need a gradient."""
    like = next(mixer.parameters())
    x = torch.randn(1 if packed else batch, length, 24, dtype=like.dtype, device=device, requires_grad=True)
    offsets = torch.tensor(PACKED, device=device) if packed else None
    if not state:
        return x, None, offsets
    with torch.no_grad():
        _, given = mixer(torch.randn_like(x), None, offsets)
    return x, tuple(s.detach().requires_grad_(s.is_floating_point()) for s in given), offsets


def results(mixer, x, state, offsets, used=(True, True)):
    """Outputs, states and gradients; used: whether something is made of y, and of the state."""
    y, after = mixer(x, state, offsets)
    floats = [s for s in after if s.is_floating_point()]
    parts = [y.sin().sum()] * used[0] + [s.sin().sum() for s in floats] * used[1]
    leaves = [x, *mixer.parameters(), *(s for s in state or () if s.requires_grad)]
    grads = torch.autograd.grad(sum(parts), leaves, allow_unused=True, materialize_grads=True)
    return [y, *after, *grads]


def compare(got, right, limit):
    assert len(got) == len(right)
    for x, y in zip(got, right, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert not x.numel() or relative_error(x.double(), y.double()) <= limit


@mixers
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_one_op_is_its_parts(name, packed, state, used):
    """used: results that something is made of."""
    given = inputs(made(name), packed, state)
    compare(results(made(name), *given, used), results(apart(made(name)), *given, used), 1e-12)


@mixers
@pytest.mark.parametrize("length", [0, 1])
def test_of_few_tokens(name, length):
    given = inputs(made(name), False, True, length)
    compare(results(made(name), *given), results(apart(made(name)), *given), 1e-12)


@mixers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_around_kernels(name, dtype, packed):
    """As on a GPU, their kernels by PyTorch. In bfloat16 roundings are in other places: the error is no larger."""
    mixer = made(name, dtype)
    x, _, offsets = inputs(mixer, packed, False)
    exact = results(apart(made(name, dtype).double()), x.detach().double().requires_grad_(), None, offsets)
    with fused_on_cpu():
        got = results(mixer, x, None, offsets)
    theirs = results(apart(made(name, dtype)), x, None, offsets)
    for mine, other, right in zip(got, theirs, exact, strict=True):
        error, by_parts = (relative_error(y.double(), right.double()) for y in (mine, other))
        assert error <= max(2 * by_parts, 1e-6)


@mixers
def test_under_autocast(name):
    """Projections in bfloat16, states and parameters' gradients in float32."""
    mixer = made(name, torch.float32)
    given = inputs(mixer, False, True)
    for around in (nullcontext, fused_on_cpu):
        with around(), torch.autocast("cpu", torch.bfloat16):
            got = results(mixer, *given)
        exact = results(made(name), given[0].detach().double().requires_grad_(), tuple(
            s.detach().double().requires_grad_() if s.is_floating_point() else s for s in given[1]), None)  # fmt: skip
        assert got[0].dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in got[1:] if x.is_floating_point())
        for x, y in zip(got, exact, strict=True):
            assert relative_error(x.double(), y.double()) <= 0.05


@mixers
def test_compiles_as_one_graph(name):
    mixer = made(name)
    given = inputs(mixer, False, True)
    torch._dynamo.reset()
    compare(results(torch.compile(mixer, fullgraph=True, backend="aot_eager"), *given), results(mixer, *given), 1e-12)


@mixers
@pytest.mark.parametrize("packed", [False, True])
def test_fakes_say_what_comes(name, packed):
    """Of both passes, with a state and without, and of a call without a gradient."""
    mixer = made(name, torch.float32)
    with Compared() as compared:
        results(mixer, *inputs(mixer, packed, True))
        results(mixer, *inputs(mixer, packed, False))
        with torch.no_grad():
            mixer(*inputs(mixer, packed, False))
    assert compared.wrong == []
    assert len(compared.seen) == 2


@pytest.mark.slow
def test_opcheck():
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for phase in (None, torch.randn(4, requires_grad=True)):
        columns, numbers = (8, 8) if phase is None else (8, 4)
        packed, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 4, columns, requires_grad=True)
        bias, rate = torch.randn(2, columns, requires_grad=True), torch.randn(numbers, requires_grad=True)
        given = (packed, weight, bias, rate, phase, torch.randn(2, 8, requires_grad=True))
        op = torch.ops.holdfast.lru_layer_forward.default
        torch.library.opcheck(op, (*given, 8.0, None, True, ""), test_utils=checks)
        assert lru_layer(*given, 8.0, None, None)[0].shape == (2, 5, 8)
    packed, norm = torch.randn(2, 5, 40, requires_grad=True), torch.randn(6, requires_grad=True)
    state = torch.randn(2, 2, 4, 6, requires_grad=True)
    op = torch.ops.holdfast.retention_layer_forward.default
    for position in (None, torch.arange(5)[None]):
        given = (packed, norm, state, position, 2, 10000.0, 1e-5, None)
        torch.library.opcheck(op, (*given, True, "", 0), test_utils=checks)
        assert retention_layer(*given, None, 0)[0].shape == (2, 5, 12)


@pytest.mark.gpu
@mixers
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu(name, packed):
    """From the third call on what was recorded runs; the same bits each time."""
    mixer = made(name, torch.float32).cuda()
    given = inputs(mixer, packed, True, length=11, device="cuda")
    found = [results(mixer, *given) for _ in range(5)]
    compare(found[0], results(apart(made(name, torch.float32).cuda()), *given), 2e-6)
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))
