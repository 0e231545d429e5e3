"""Delta rules whose keys are one number in memory along an axis: computed in float32, returned in the inputs' dtype."""

import pytest
import torch

import holdfast
from holdfast.ops import delta_rules, matrix
from holdfast.recurrences import RECURRENCES, Draw, Sizes

SIZES = Sizes(B=2, T=5, H=4, Hq=2, K=8, V=6)
OPS = ("delta_rule", "gated_delta_rule", "kda", "gdn2", "gated_delta_product")


def example(name, dtype=torch.bfloat16):
    return RECURRENCES[name].example(Draw(3, dtype), SIZES)


def expanded(k, axis):
    return k.narrow(axis, 0, 1).expand(k.shape)


@pytest.fixture
def calls(monkeypatch):
    """The calls that the family gets."""
    seen, run = [], matrix.run
    monkeypatch.setattr(matrix, "run", lambda r, mapped, *rest: seen.append(mapped[0]) or run(r, mapped, *rest))
    return seen


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("name", OPS)
def test_repeated_keys_are_computed_in_float32(calls, name, axis):
    arguments = example(name)
    arguments["k"] = expanded(arguments["k"], axis).requires_grad_()
    o, _ = getattr(holdfast, name)(**arguments)
    assert {x.dtype for x in (*calls[0][:3], calls[0].e) if x is not None} == {torch.float32}
    assert o.dtype == torch.bfloat16
    (dk,) = torch.autograd.grad(o.sum(), arguments["k"])
    assert dk.dtype == torch.bfloat16


@pytest.mark.parametrize("name", OPS)
def test_other_keys_are_not(calls, name):
    arguments = example(name)
    getattr(holdfast, name)(**arguments)
    arguments["k"] = expanded(expanded(arguments["k"], 0), -2)
    getattr(holdfast, name)(**arguments)
    arguments["k"] = example(name)["k"][:, :1].expand(arguments["k"][:, :1].shape)
    getattr(holdfast, name)(**{n: x if n == "initial_state" else x[:, :1] for n, x in arguments.items()})
    assert [call.k.dtype for call in calls] == [torch.bfloat16] * 3


def test_wider_dtypes_stay(calls):
    for dtype in (torch.float32, torch.float64):
        arguments = example("delta_rule", dtype)
        arguments["k"] = expanded(arguments["k"], -1)
        assert holdfast.delta_rule(**arguments)[0].dtype == dtype
    assert [call.k.dtype for call in calls] == [torch.float32, torch.float64]


def test_under_autocast_it_is_the_given_key_that_repeats(calls):
    arguments = example("delta_rule", torch.float32)
    arguments["k"] = expanded(arguments["k"], 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert holdfast.delta_rule(**arguments)[0].dtype == torch.bfloat16
    assert calls[0].k.dtype == torch.float32


def test_a_backend_that_cannot_says_why():
    arguments = example("delta_rule")
    arguments["k"] = expanded(arguments["k"], -1)
    with pytest.raises(ValueError, match="hopper") as raised:
        holdfast.delta_rule(**arguments, backend="hopper")
    assert raised.value.__notes__ == [
        f"k is expanded, strides {arguments['k'].stride()}: such keys are computed in torch.float32"
    ]


def test_repeated_axes():
    k = torch.empty(2, 3, 4, 5)
    assert not delta_rules.repeats(k)
    assert [delta_rules.repeats(expanded(k, axis)) for axis in range(4)] == [False, True, False, True]
    assert not delta_rules.repeats(k[:, :1].expand(2, 1, 4, 5))
    # of a product, each token's writes too
    assert delta_rules.repeats(expanded(torch.empty(2, 3, 2, 4, 5), 2))
