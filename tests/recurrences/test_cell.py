"""Cells: what may be written, what is refused, and graphs that compute what the function computes."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from holdfast.recurrences import Cell, cell
from holdfast.recurrences.elman import elman, elman_relu
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.slstm import slstm


def one(body, states=("h",), gates=("a", "b")):
    """A cell with the state h' = body(h, a, b)."""

    @cell(states=states, gates=gates)
    def trial(s, g):
        return {"h": body(s.h, g.a, g.b)}

    return trial


def run(graph, *inputs):
    return torch.fx.GraphModule(torch.nn.Module(), graph)(*inputs)


def check_graphs(tested, inputs, limit=1e-12):
    """Both graphs against the function itself, differentiated by torch."""
    states = len(tested.states)
    outputs, pullback = torch.func.vjp(lambda *x: tested.step(x[:states], x[states:]), *inputs)
    outputs = tuple(x.expand_as(inputs[0]) for x in outputs)
    cotangents = tuple(torch.randn_like(x) for x in outputs)
    exact = pullback(cotangents)
    dtype = inputs[0].dtype
    got = run(tested.forward_graph(dtype), *inputs)
    for x, y in zip(got, outputs, strict=True):
        torch.testing.assert_close(x, y, rtol=limit, atol=limit)
    for x, y in zip(run(tested.backward_graph(dtype), *inputs, *cotangents), exact, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=limit, atol=limit)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(h, a, b):
    x = h * 1
    y = x
    y.mul_(a)
    x.masked_fill_(b > 0, 0.5)
    return x + y


def filled(h, a, b):
    x = torch.empty_like(h)
    x.copy_(a * 2)
    y = torch.zeros_like(x)
    y += b
    return x.clamp_(-1, 1) * y


TRAINABLE = torch.tensor(2.0, requires_grad=True)

FUNCTIONS = {
    "softplus": lambda h, a, b: F.softplus(h) + F.mish(a),
    "log": lambda h, a, b: F.logsigmoid(h) * a + torch.log1p(b * b) + torch.expm1(a),
    "extrema": lambda h, a, b: torch.maximum(h, a) + torch.minimum(a, b) + h.clamp(-1, 1) + a.clamp(b, b + 1),
    "extrema at ties": lambda h, a, b: torch.maximum(h.round(), a.round()) + h - h.round(),
    "activations": lambda h, a, b: F.gelu(h) + F.silu(a) + F.relu(b) + F.leaky_relu(h) + F.elu(a) + F.hardtanh(b),
    "where": lambda h, a, b: torch.where(h > 0, a * b, torch.sigmoid(h)),
    "division": lambda h, a, b: h / (1 + a * a) + 1 / (2 + b * b) + a**3 + torch.sqrt(b * b + 1),
    "constants": lambda h, a, b: torch.tensor(0.25) * h + a * 0.0 + torch.ones_like(b) - 2,
    "state untouched": lambda h, a, b: a * b,
    "gates untouched": lambda h, a, b: torch.sin(h),
    "constant": lambda h, a, b: torch.zeros_like(h),
    "identity": lambda h, a, b: h,
    "in place": in_place,
    "filled": filled,
    "cut": lambda h, a, b: h.detach() * a + b,
    "straight through": lambda h, a, b: StraightThrough.apply(a) * h,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_compute_what_the_function_computes(name):
    check_graphs(one(FUNCTIONS[name]), [3 * torch.randn(5, 7, dtype=torch.float64) for _ in range(3)])


@pytest.mark.parametrize("builtin", [elman, elman_relu, lstm, gru, slstm], ids=lambda c: c.name)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_graphs_of_the_built_in_cells(builtin, dtype, limit):
    inputs = [torch.randn(5, 7, dtype=dtype) for _ in builtin.states + builtin.gates]
    if builtin is slstm:
        inputs[2] = inputs[2].abs() * (torch.rand(5, 7) > 0.3)
    check_graphs(builtin, inputs, limit)


def test_the_graph_is_small_and_names_its_inputs():
    graph = lstm.backward_graph(torch.float32)
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    assert inputs == ["s_h", "s_c", "g_i", "g_f", "g_z", "g_o", "d_h", "d_c"]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    # 5 activations and their derivatives, 8 products, 2 sums, and zeros for the h that the cell ignores
    assert len(calls) == 21
    assert all(node.users for node in calls)
    others = [node.target for node in calls if torch.Tag.pointwise not in node.target.tags]
    assert others == [torch.ops.aten.full_like.default]
    assert len({(node.target, node.args) for node in calls}) == len(calls)


def test_a_graph_is_traced_once_per_dtype():
    assert lstm.forward_graph(torch.float32) is lstm.forward_graph(torch.float32)
    assert lstm.forward_graph(torch.float32) is not lstm.forward_graph(torch.float64)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        FakeTensorMode,
        torch._C._AutoDispatchBelowAutograd,
        # as an operator that another one calls sees it
        lambda: torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchGradWrapper)),
    ],
)
def test_tracing_does_not_depend_on_the_mode_it_starts_in(mode):
    tested = one(lambda h, a, b: F.logsigmoid(a) * h + torch.tanh(b))
    with mode():
        tested.backward_graph(torch.float32)
    check_graphs(tested, [torch.randn(4) for _ in range(3)], 1e-6)


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (lambda h, a, b: a.sum(), ValueError, ["pointwise", "aten.sum"]),
        (lambda h, a, b: a.cumsum(-1), ValueError, ["pointwise", "cumsum"]),
        (lambda h, a, b: a.softmax(-1), ValueError, ["pointwise", "softmax"]),
        (lambda h, a, b: F.dropout(a), ValueError, ["bernoulli", "random"]),
        (lambda h, a, b: a if a > 0 else b, ValueError, ["torch.where"]),
        (lambda h, a, b: a > 0, TypeError, ["h", "torch.float32", "torch.bool"]),
        (lambda h, a, b: a.double(), TypeError, ["h", "torch.float32", "torch.float64"]),
        (lambda h, a, b: torch.ones(3) * a, ValueError, ["shape", "axis"]),
        (lambda h, a, b: TRAINABLE * a, ValueError, ["trainable"]),
    ],
)
def test_functions_that_are_refused_say_why(body, error, words):
    tested = one(body)
    with pytest.raises(error) as caught:
        tested.backward_graph(torch.float32)
    assert all(word in str(caught.value) for word in ["trial", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        ({"h": torch.ones(())}, ValueError, ["h, c", "missing c"]),
        ({"h": torch.ones(()), "c": torch.ones(()), "k": torch.ones(())}, ValueError, ["unknown k"]),
        (torch.ones(()), TypeError, ["dict", "Tensor"]),
        ({"h": torch.ones(()), "c": 1.0}, TypeError, ["'c'", "float"]),
    ],
)
def test_wrong_results_are_named(result, error, words):
    @cell(states=("h", "c"), gates=("a",))
    def trial(s, g):
        return result

    with pytest.raises(error) as caught:
        trial.forward_graph(torch.float32)
    assert all(word in str(caught.value) for word in ["trial", *words]), str(caught.value)


def test_an_unknown_name_in_the_function_is_explained():
    @cell(states=("h",), gates=("a", "b"))
    def trial(s, g):
        return {"h": g.i}

    with pytest.raises(AttributeError, match="'trial' has no gate 'i'; it has a, b"):
        trial.forward_graph(torch.float32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"states": (), "gates": ("a",)}, ValueError, ["states", "at least one"]),
        ({"states": ("h", "h"), "gates": ("a",)}, ValueError, ["states", "h more than once"]),
        ({"states": "h", "gates": ("a",)}, TypeError, ["states", "'h'"]),
        ({"states": ("h",), "gates": ("a", "b", "a")}, ValueError, ["gates", "a more than once"]),
        ({"states": ("h",), "gates": ("a b",)}, ValueError, ["gates", "identifiers", "'a b'"]),
        ({"states": ("h",), "gates": ("_a",)}, ValueError, ["gates", "'_a'"]),
        ({"states": ("h",), "gates": (1,)}, TypeError, ["gates", "(1,)"]),
        ({"states": ("h",), "gates": ("a",), "input": ("x",)}, ValueError, ["input", "a", "x"]),
        ({"states": ("h",), "gates": ("a",), "recurrent": ("y",)}, ValueError, ["recurrent", "a", "y"]),
        ({"states": ("h",), "gates": ("a",), "recurrent": ()}, ValueError, ["recurrent", "at least one"]),
        (
            {"states": ("h",), "gates": ("a", "b", "c"), "input": ("a",), "recurrent": ("b",)},
            ValueError,
            ["gates", "c in neither"],
        ),
    ],
)
def test_declarations_are_checked(options, error, words):
    with pytest.raises(error) as caught:
        cell(**options)(lambda s, g: {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_gates_feed_from_everywhere_by_default():
    assert lstm.input == lstm.recurrent == lstm.gates == ("i", "f", "z", "o")
    assert (gru.input, gru.recurrent) == (("r", "z", "n"), ("r", "z", "m"))


def test_a_cell_defined_again_leaves_the_first_as_it_was():
    def leaky(rate):
        @cell(states=("h",), gates=("a",))
        def leak(s, g):
            return {"h": rate * s.h + g.a}

        return leak

    slow, fast = leaky(0.9), leaky(0.1)
    assert slow.key != fast.key
    h, a = torch.tensor([1.0]), torch.tensor([0.0])
    assert run(slow.forward_graph(torch.float32), h, a)[0].item() == pytest.approx(0.9)
    assert run(fast.forward_graph(torch.float32), h, a)[0].item() == pytest.approx(0.1)


def test_a_cell_pickles_and_copies_by_its_name():
    assert pickle.loads(pickle.dumps(lstm)) is lstm
    assert copy.deepcopy({"cell": gru})["cell"] is gru
    assert isinstance(lstm, Cell)


def test_an_operation_of_several_results_is_refused():
    @cell(states=("h",), gates=("a",))
    def parts(s, g):
        mantissa, _ = torch.frexp(s.h)
        return {"h": mantissa + g.a}

    with pytest.raises(ValueError, match=r"cell 'parts': expected operations with one result; aten\.frexp"):
        parts.forward_graph(torch.float32)


def test_a_cell_may_change_what_it_has_made_and_what_it_is_given():
    @cell(states=("h",), gates=("a",))
    def inside(s, g):
        g.a.mul_(2.0)
        return {"h": (s.h * g.a).add_(g.a)}

    h, a, d = torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([1.0])
    assert run(inside.forward_graph(torch.float32), h, a)[0].item() == pytest.approx(0.75)
    assert [x.item() for x in run(inside.backward_graph(torch.float32), h, a, d)] == pytest.approx([0.5, 3.0])


def test_a_traced_cell_has_not_imported_dynamo():
    """Its import takes longer than all else in a first call."""
    code = """
import sys, torch
from holdfast.recurrences.lstm import lstm
lstm.backward_graph(torch.float32)
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
