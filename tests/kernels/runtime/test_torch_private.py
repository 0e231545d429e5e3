"""Private names of PyTorch: what serves where one is missing or changed, and that it comes to the same results."""

import importlib.util
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad

from holdfast.kernels.runtime import torch_private
from holdfast.recurrences import torch_private as below

# place, name -> what the module then has
SUBSTITUTES = {
    (torch._C, "_len_torch_dispatch_stack"): lambda copy: copy.dispatch_modes() == 1 and not copy.CAN_REPLAY,
    (torch._C, "_are_functorch_transforms_active"): lambda copy: not copy.is_transformed() and not copy.CAN_REPLAY,
    (forward_ad, "_current_level"): lambda copy: copy.may_have_tangents() and not copy.CAN_REPLAY,
    (torch.autograd, "_profiler_enabled"): lambda copy: not copy.CAN_REPLAY,
    (torch._C, "_DisableAutocast"): lambda copy: not copy.CAN_REPLAY,
    (torch._C, "_dispatch_keys"): lambda copy: not copy.CAN_REPLAY,
    (torch._C._dynamo.guards, "TensorGuards"): lambda copy: copy.tensor_check is None and copy.CAN_REPLAY,
    (torch._C._functorch, "get_unwrapped"): lambda copy: copy.is_wrapped(torch.ones(1)) and copy.CAN_REPLAY,
    (torch._C._dynamo.guards, "_reinterpret_tensor"): lambda copy: copy.part_of is copy._as_strided and copy.CAN_REPLAY,
    (torch._C, "_AutoDispatchBelowAutograd"): lambda copy: copy.below_autograd is None and copy.CAN_REPLAY,
}


def loaded(source=torch_private):
    """The module made anew."""
    spec = importlib.util.spec_from_file_location(f"{source.__name__}_anew", source.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.fixture(autouse=True)
def nothing_missing(monkeypatch):
    monkeypatch.setattr(below, "MISSING", [])


def test_this_pytorch_has_all_of_them():
    assert torch_private.MISSING == []
    assert torch_private.CAN_REPLAY


def test_nothing_is_said_where_all_are_there():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = loaded()
    assert not copy.is_observed()


def changed(*_, **__):
    """In the place of a name: there, and of no use."""
    return "something else"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "changed"])
@pytest.mark.parametrize(("place", "name"), SUBSTITUTES, ids=[name for _, name in SUBSTITUTES])
def test_one_that_is_missing_or_changed_is_warned_of_and_replaced(place, name, is_there, monkeypatch):
    with monkeypatch.context() as patch:
        if is_there:
            patch.setattr(place, name, changed)
        else:
            patch.delattr(place, name)
        with pytest.warns(RuntimeWarning, match=re.escape(torch.__version__)) as said:
            copy = loaded()
    (warning,) = said
    assert "faster: torch" in str(warning.message)
    assert len(copy.MISSING) == 1
    assert SUBSTITUTES[place, name](copy)
    # what cannot tell whether anything looks says that something does
    assert copy.is_observed() == (not copy.CAN_REPLAY)


@pytest.mark.parametrize(
    "within",
    [
        lambda look: torch.func.vmap(lambda x: (x, look())[0])(torch.ones(2)),
        lambda look: torch.func.jvp(lambda x: (x, look())[0], (torch.ones(2),), (torch.ones(2),)),
        lambda look: entered(torch_private.DispatchMode(), look),
        lambda look: entered(forward_ad.dual_level(), look),
        lambda look: entered(torch.profiler.profile(), look),
    ],
    ids=["vmap", "jvp", "mode", "tangents", "profiler"],
)
def test_what_looks_at_operations_is_noticed(within):
    seen = []
    within(lambda: seen.append(torch_private.is_observed()))
    assert seen == [True]
    assert not torch_private.is_observed()


def entered(context, run):
    with context:
        run()


def test_storages_are_told_apart_by_their_addresses_too():
    x, y = torch.ones(4), torch.ones(4)
    for shares in (torch_private.shares_storage, torch_private._by_address):
        assert shares(x, x[2:])
        assert not shares(x, y)


def test_a_negation_is_lazy_without_the_private_name(monkeypatch):
    x = torch.randn(3)
    for _ in range(2):
        assert torch_private.negated(x).is_neg()
        assert torch.equal(torch_private.negated(x), -x)
        monkeypatch.delattr(torch, "_neg_view", raising=False)


def test_a_graph_of_its_own_where_nobody_knows_of_hooks(monkeypatch):
    """The caller's hooks see nothing of it, nor is anything differentiated otherwise."""
    seen = []
    for knows in (True, False):
        if not knows:
            monkeypatch.setattr(below, "_hooks_on_saved", lambda: True)
        for context in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(seen.append, seen.pop)):
            x = torch.full((2,), 3.0, requires_grad=True)
            with context:
                with below.own_graph():
                    y = x * x
                assert not seen
            y.sum().backward()
            assert torch.equal(x.grad, 2 * x)


def test_nested_structures_are_taken_apart_without_pytree():
    tree = {"a": [1, (2.5, None)], "b": (), "c": "x"}
    assert below._leaves(tree) == below.tree_leaves(tree)
    assert below._mapped(repr, tree) == below.tree_map(repr, tree)


def test_writing_operators_are_known_by_name_without_schemas(monkeypatch):
    aten = torch.ops.aten
    for _ in range(2):
        assert below.is_mutable(aten.mul_.Tensor)
        assert not below.is_mutable(aten.mul.Tensor)
        monkeypatch.setattr(below, "schema_of", lambda op: None)
    assert [(below.name_of(x), below.overload_of(x)) for x in (aten.mul.Tensor, aten.relu.default)] == [
        ("mul", "Tensor"), ("relu", "default"),
    ]  # fmt: skip


WITHOUT = """
import warnings
import torch
from torch.autograd import forward_ad

places = [(torch._C, "_len_torch_dispatch_stack"), (torch._C, "_are_functorch_transforms_active"),
          (torch.autograd, "_profiler_enabled"), (torch._C, "_DisableAutocast"), (torch._C, "_dispatch_keys"),
          (torch._C._dynamo.guards, "TensorGuards"), (torch._C._functorch, "get_unwrapped"),
          (torch._C._dynamo.guards, "_reinterpret_tensor"),
          (torch._C, "_AutoDispatchBelowAutograd"), (torch._C, "_AutoDispatchBelowADInplaceOrView")]
held = [getattr(*each) for each in places]
for each in places:
    delattr(*each)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from holdfast.kernels.runtime import torch_private
# PyTorch needs them itself, wherever it may have them
for each, value in zip(places, held):
    setattr(*each, value)
import holdfast

(warning,) = [each for each in said if "private names" in str(each.message)]
assert len(torch_private.MISSING) == 9 and not torch_private.CAN_REPLAY, torch_private.MISSING
assert torch_private.below_autograd is None

def results(backend):
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    for _ in range(3):
        o, state = holdfast.gla(q, k, v, torch.nn.functional.logsigmoid(g), output_final_state=True, backend=backend)
        found = [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), (q, k, v, g))]
    state = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for t in range(9):
            token = {"q": q[:, t:t + 1], "k": k[:, t:t + 1], "v": v[:, t:t + 1]}
            token["g"] = torch.nn.functional.logsigmoid(g[:, t:t + 1])
            step = holdfast.step("gla", token, state)
            torch.testing.assert_close(step[:, 0], o[:, t])
    assert state._version >= 9
    x, R = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 4, 2, 8), (4, 2, 8, 8)))
    y, _ = holdfast.lstm(x, R)
    return [*found, y, *torch.autograd.grad(y.square().sum(), (x, R))]

for got, right in zip(results(None), results("reference")):
    torch.testing.assert_close(got, right)
try:
    torch.func.grad(lambda x: holdfast.gla(x, x, x, -x.abs())[0].sum())(torch.ones(1, 3, 1, 2))
except (NotImplementedError, RuntimeError):
    print("right")
"""


@pytest.mark.slow
def test_all_goes_on_without_them():
    """In another process, whose ops are registered without them: outputs, gradients and steps, as by the reference."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env={"PYTHONPATH": "src"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
