"""The ops around kernels that run on a GPU alone, their kernels replaced by PyTorch: what goes in, what comes out."""

import pytest
import torch

from fused_on_cpu import fused_on_cpu
from holdfast.kernels.norm.torch.backend import PyTorchGatedNorm
from holdfast.ops import gated_rms_norm
from holdfast.recurrences.delta_rule import prepared
from holdfast.recurrences.kda import log_decay
from test_strides import Compared

pytest.importorskip("triton")
from holdfast.kernels.matrix.delta_rule.inputs import triton as triton_delta_inputs
from holdfast.kernels.matrix.mlstm.gates import launch as triton_mlstm_gates
from holdfast.kernels.matrix.vector_decay.gates import launch as triton_gate
from holdfast.ops.delta_inputs import fused_inputs
from holdfast.ops.kda_gate import fused_log_decay
from holdfast.ops.mlstm_gates import fused_gates
from holdfast.recurrences.mlstm import gates

NAMES = ("q", "k", "g", "beta", "A_log", "dt_bias")


def values(inputs, norm, largest):
    q, k, g, beta, rate, bias = inputs
    strength = torch.zeros(1) if beta is None else beta
    made = prepared(q, k, g, strength, rate, bias, norm, beta is not None, largest == 2)
    asked = (norm, norm, g is not None, beta is not None)
    return tuple(x if wanted else None for x, wanted in zip(made, asked, strict=True))


@pytest.fixture
def kernels(monkeypatch):
    """Stand in for run_forward and run_backward, and check what they are given."""

    def check(inputs, norm, largest):
        q, k, g, _, rate, bias = inputs
        assert isinstance(norm, bool)
        assert isinstance(largest, float)
        assert q.shape == k.shape
        assert (g is None) == (rate is None)
        assert all(x is None or x.is_contiguous() for x in (rate, bias))

    def forward(inputs, norm, largest):
        check(inputs, norm, largest)
        return values(inputs, norm, largest)

    def backward(inputs, norm, largest, grads):
        check(inputs, norm, largest)
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            made = values(leaves, norm, largest)
        pairs = [(x, grad) for x, grad in zip(made, grads, strict=True) if x is not None]
        assert all(grad is not None for _, grad in pairs)
        outputs, given = zip(*pairs, strict=True)
        used = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, used, given, allow_unused=True))
        found = [None if x is None else next(found) for x in leaves]
        return *(x if norm else None for x in found[:2]), *found[2:]

    monkeypatch.setattr(triton_delta_inputs, "run_forward", forward)
    monkeypatch.setattr(triton_delta_inputs, "run_backward", backward)


def example(without=()):
    made = {name: torch.randn(2, 5, 2, 8) for name in ("q", "k")} | {
        name: torch.randn(2, 5, 4) for name in ("g", "beta")
    }
    # a vector of every second number is not contiguous
    made |= {name: torch.randn(8)[::2] for name in ("A_log", "dt_bias")}
    return {name: None if name in without else made[name].requires_grad_() for name in NAMES}


def results(function, given, options, skip=()):
    made = function(*given.values(), *options)
    loss = sum((n + 1) * x.sin().sum() for n, x in enumerate(made) if x is not None and n not in skip)
    used = [x for x in given.values() if x is not None]
    return made, torch.autograd.grad(loss, used, allow_unused=True)


@pytest.mark.parametrize("skip", [(), (0,), (1, 3), (2,)])
@pytest.mark.parametrize(
    ("without", "options"),
    [
        ((), (True, True, True)),
        ((), (True, True, False)),
        ((), (False, True, False)),
        (("dt_bias",), (True, False, False)),
        (("g", "A_log", "dt_bias"), (True, True, True)),
        (("A_log", "dt_bias"), (True, True, False)),
        (("A_log", "dt_bias"), (False, False, False)),
    ],
)
def test_the_deltas_inputs_are_those_of_pytorch(kernels, without, options, skip):
    """skip: results that nothing is made of, so that their gradients are None."""
    given = example(without)
    (made, grads), (right, exact) = results(fused_inputs, given, options, skip), results(prepared, given, options, skip)
    for got, wanted in zip((*made, *grads), (*right, *exact), strict=True):
        if wanted is None:
            # of an op's input that nothing comes of, zeros
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, wanted)


def test_a_decay_a_head_is_spread_over_the_tokens(kernels):
    given = example(("A_log", "dt_bias")) | {"g": torch.randn(4)}
    g = fused_inputs(*given.values(), True, True, False)[2]
    assert torch.equal(g, given["g"].expand(2, 5, 4))


def test_float64_gates_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(triton_delta_inputs, "run_forward", lambda *rest: pytest.fail("the kernel ran"))
    for name in ("g", "beta", "A_log", "dt_bias"):
        given = example()
        given[name] = given[name].detach().double()
        found, right = fused_inputs(*given.values(), True, True, True), prepared(*given.values(), True, True, True)
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def decays():
    made = {"g": torch.randn(2, 5, 4, 6), "A_log": torch.randn(8)[::2], "dt_bias": torch.randn(6, 4).t()}
    return {name: x.requires_grad_() for name, x in made.items()}


@pytest.mark.parametrize(
    ("without", "bound"),
    [((), None), (("dt_bias",), None), ((), -5.0), (("A_log",), -5), (("A_log", "dt_bias"), -0.5)],
)
def test_kdas_gate_is_that_of_pytorch(without, bound):
    given = decays() | dict.fromkeys(without)
    with fused_on_cpu():
        found = fused_log_decay(*given.values(), bound)
        leaves = [x for x in given.values() if x is not None]
        grads = torch.autograd.grad(found.sin().sum(), leaves)
    right = log_decay(*given.values(), bound)
    exact = torch.autograd.grad(right.sin().sum(), leaves)
    for got, wanted in zip((found, *grads), (right, *exact), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("function", [fused_log_decay, log_decay])
def test_a_bias_without_a_gate_is_refused(function):
    given = decays() | {"A_log": None}
    with pytest.raises(ValueError, match="dt_bias: expected A_log or lower_bound beside it"):
        function(*given.values(), None)


def test_a_log_decay_is_no_gate(monkeypatch):
    monkeypatch.setattr(triton_gate, "run_forward", lambda *rest: pytest.fail("the kernel ran"))
    g = torch.randn(2, 5, 4, 6)
    assert fused_log_decay(g, None, None, None) is g
    for name in ("A_log", "dt_bias"):
        given = {n: x.detach() for n, x in decays().items()}
        given[name] = given[name].double()
        assert torch.equal(fused_log_decay(*given.values(), None), log_decay(*given.values(), None))


@pytest.mark.parametrize(("shape", "taken"), [((8,), (8,)), ((4, 8), (4, 8)), (None, None)])
def test_a_norms_kernel_gets_its_weight_as_it_is(monkeypatch, shape, taken):
    seen = []
    forward, backward = PyTorchGatedNorm.forward, PyTorchGatedNorm.backward

    def noted(self, plan, call):
        seen.append(None if call.weight is None else tuple(call.weight.shape))
        return forward(self, plan, call)

    def noted_backward(self, plan, call, grad, into=None):
        seen.append(None if call.weight is None else tuple(call.weight.shape))
        return backward(self, plan, call, grad, into)

    monkeypatch.setattr(PyTorchGatedNorm, "forward", noted)
    monkeypatch.setattr(PyTorchGatedNorm, "backward", noted_backward)
    o = torch.randn(2, 3, 4, 8, requires_grad=True)
    weight = None if shape is None else torch.randn(shape, requires_grad=True)
    gated_rms_norm(o, None, weight).sum().backward()
    assert seen == [taken, taken]
    assert weight is None or weight.grad.shape == weight.shape


@pytest.fixture
def gate_kernels(monkeypatch):
    """Stand in for the kernels of mLSTM's gates; a list of what the backward pass was given."""
    seen = []

    def forward(i, f, m, cu_seqlens, exponential):
        assert m is None or m.is_contiguous()
        return tuple(x.clone() for x in gates(i, f, m, cu_seqlens, exponential, torch.float32))

    def backward(i, f, m, cu_seqlens, exponential, g, beta, cotangents):
        dg, dbeta, dm, dlast = cotangents.dg, cotangents.dbeta, cotangents.dm, cotangents.dlast
        seen.append(((g, beta), dlast))
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in (i, f, m)]
            made = gates(*leaves, cu_seqlens, exponential, torch.float32)
        for one, other in zip((g, beta), made, strict=False):
            torch.testing.assert_close(one, other.detach())
        dm = torch.zeros_like(made[2]) if dm is None else dm
        given = (dg, dbeta, dm, torch.zeros_like(made[3]) if dlast is None else dlast)
        pairs = [(x, grad) for x, grad in zip(made, given, strict=True) if x.requires_grad]
        used = [x for x in leaves if x is not None]
        outputs, cotangents = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, used, cotangents, allow_unused=True, materialize_grads=True))
        return [None if x is None else next(found) for x in leaves]

    monkeypatch.setattr(triton_mlstm_gates, "forward", forward)
    monkeypatch.setattr(triton_mlstm_gates, "backward", backward)
    return seen


@pytest.mark.parametrize("exponential", [True, False])
@pytest.mark.parametrize("skip", [(), (0,), (1, 2), (3,)])
@pytest.mark.parametrize("offsets", [None, [0, 2, 2, 5]])
@pytest.mark.parametrize("with_m", [True, False])
def test_mlstms_gates_are_those_of_pytorch(gate_kernels, exponential, skip, offsets, with_m):
    """skip: results that nothing is made of. m: every second column of a wider tensor."""
    batch, sequences = (2, 2) if offsets is None else (1, 3)
    i, f = (torch.randn(batch, 5, 4, requires_grad=True) for _ in range(2))
    m = torch.randn(sequences, 8)[:, ::2].requires_grad_() if with_m else None
    cu_seqlens = None if offsets is None else torch.tensor(offsets)

    def both(function, *rest):
        made = function(i, f, m, cu_seqlens, exponential, *rest)
        parts = [(n + 1) * x.sin().sum() for n, x in enumerate(made) if n not in skip and x.requires_grad]
        return made, torch.autograd.grad(sum(parts), [i, f] + [m] * with_m, allow_unused=True, materialize_grads=True)

    (made, grads), (right, exact) = both(fused_gates), both(gates, torch.float32)
    for got, wanted in zip((*made, *grads), (*right, *exact), strict=True):
        torch.testing.assert_close(got, wanted)
    ((_, dlast),) = gate_kernels
    # what is not asked for comes as None, for the kernel to leave out
    assert (dlast is None) == (3 in skip)


def test_fakes_say_what_comes_of_packed_gates():
    """As many last and first stabilisers as sequences."""
    i, f = (torch.randn(1, 5, 4, requires_grad=True) for _ in range(2))
    m = torch.randn(3, 4, requires_grad=True)
    with fused_on_cpu(), Compared() as compared:
        made = fused_gates(i, f, m, torch.tensor([0, 2, 2, 5]), True)
        torch.autograd.grad(sum(x.sum() for x in made if x.requires_grad), [i, f, m])
    assert compared.wrong == []
    assert compared.seen == {"mlstm_gates", "mlstm_gates_backward"}


def test_offsets_of_packed_gates_are_checked(gate_kernels):
    i = torch.randn(1, 5, 2)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets from 0 to T = 5"):
        fused_gates(i, i, None, torch.tensor([0, 4]), True)
