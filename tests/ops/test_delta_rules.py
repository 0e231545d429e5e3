"""Delta rules whose keys are one number in memory along an axis: computed in a wider dtype, returned in their own."""

import pytest
import torch

import holdfast
from holdfast.ops import delta_rules, matrix
from holdfast.recurrences import RECURRENCES, Draw, Sizes

SIZES = Sizes(B=2, T=5, H=4, Hq=2, K=8, V=6)
OPS = ("delta_rule", "gated_delta_rule", "kda", "gdn2", "comba", "gated_delta_product", "rwkv7")
# what the state is written along
KEYS = dict.fromkeys(OPS, "k") | {"rwkv7": "b"}
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


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
@pytest.mark.parametrize("dtype", WIDER, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_repeated_keys_are_computed_in_a_wider_dtype(calls, name, dtype, axis):
    arguments, key = example(name, dtype), KEYS[name]
    arguments[key] = expanded(arguments[key], axis).requires_grad_()
    state = arguments["initial_state"].requires_grad_()
    o, final = getattr(holdfast, name)(**arguments, output_final_state=True)
    assert {x.dtype for x in (*calls[0][:3], calls[0].e) if x is not None} == {WIDER[dtype]}
    assert (o.dtype, final.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(o.sum() + final.sum(), (arguments[key], state))
    assert [x.dtype for x in grads] == [dtype, torch.float32]


@pytest.mark.parametrize("name", OPS)
def test_other_keys_are_not(calls, name):
    arguments, key = example(name), KEYS[name]
    getattr(holdfast, name)(**arguments)
    arguments[key] = expanded(expanded(arguments[key], 0), -2)
    getattr(holdfast, name)(**arguments)
    arguments[key] = example(name)[key][:, :1].expand(arguments[key][:, :1].shape)
    getattr(holdfast, name)(**{n: x if n == "initial_state" else x[:, :1] for n, x in arguments.items()})
    assert [call.k.dtype for call in calls] == [torch.bfloat16] * 3


def test_float64_stays(calls):
    arguments = example("delta_rule", torch.float64)
    arguments["k"] = expanded(arguments["k"], -1)
    assert holdfast.delta_rule(**arguments)[0].dtype == calls[0].k.dtype == torch.float64


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
        f"k is expanded, strides {arguments['k'].stride()}, and such keys are computed in torch.float32"
    ]


def test_repeated_axes():
    k = torch.empty(2, 3, 4, 5)
    assert not delta_rules.repeats(k)
    assert [delta_rules.repeats(expanded(k, axis)) for axis in range(4)] == [False, True, False, True]
    assert not delta_rules.repeats(k[:, :1].expand(2, 1, 4, 5))
    # of a product, each token's writes too
    assert delta_rules.repeats(expanded(torch.empty(2, 3, 2, 4, 5), 2))
