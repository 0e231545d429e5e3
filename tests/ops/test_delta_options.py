"""The layer's options of the delta rules: the same as preparing q, k, beta and g by hand, gradients included."""

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.recurrences import DELTA_RULE, GATED_DELTA_RULE, Draw, Sizes
from parity import assert_close, op_and_oracle, values_and_grads

SIZES = Sizes(T=70, H=4, Hq=2, K=8, V=5)
OPS = {"delta_rule": DELTA_RULE, "gated_delta_rule": GATED_DELTA_RULE}
both = pytest.mark.parametrize("name", OPS)


def raw(name, dtype=torch.float64):
    """Arguments before normalisation, sigmoid and gate."""
    draw = Draw(1, dtype)
    arguments = OPS[name].example(draw, SIZES)
    arguments["k"] = draw.normal(2, SIZES.T, 2, SIZES.K)
    arguments["beta"] = draw.normal(2, SIZES.T, SIZES.H)
    if name == "gated_delta_rule":
        gate = {"g": draw.normal(2, SIZES.T, SIZES.H), "A_log": draw.normal(SIZES.H), "dt_bias": draw.normal(SIZES.H)}
        arguments |= gate
    return arguments


def by_hand(arguments, double):
    """What the options stand for, written with torch's own functions."""
    made = dict(arguments)
    for name in ("q", "k"):
        x = arguments[name]
        made[name] = x / (x.norm(dim=-1, keepdim=True).square() + 1e-6).sqrt()
    made["beta"] = torch.sigmoid(arguments["beta"]) * (2 if double else 1)
    if "A_log" in made:
        rate, bias = made.pop("A_log"), made.pop("dt_bias")
        made["g"] = -torch.exp(rate) * torch.log1p(torch.exp(arguments["g"] + bias))
    return made


@both
@pytest.mark.parametrize("double", [False, True])
def test_options_equal_the_same_steps_by_hand(name, double):
    op, arguments = getattr(holdfast, name), raw(name)
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": double, "output_final_state": True}
    got = values_and_grads(lambda a: op(**a, **options), arguments)
    expected = values_and_grads(lambda a: op(**by_hand(a, double), output_final_state=True), arguments)
    assert len(got) == 2 + len(arguments)
    assert_close(got, expected, 1e-11)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_the_gate_matches_the_oracle(backend, dtype, limit):
    arguments = raw("gated_delta_rule", dtype)
    arguments["k"] = F.normalize(arguments["k"], dim=-1)
    arguments["beta"] = arguments["beta"].sigmoid()
    got, exact = op_and_oracle(holdfast.gated_delta_rule, GATED_DELTA_RULE, arguments, backend=backend)
    assert_close(got, exact, limit)


def test_a_constant_step_size_and_no_bias():
    arguments = raw("gated_delta_rule") | {"g": torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)}
    del arguments["dt_bias"]
    options = {"qk_l2norm": True, "beta_sigmoid": True}
    constant, _ = holdfast.gated_delta_rule(**arguments, **options)
    arguments["g"] = arguments["g"].expand(2, SIZES.T, SIZES.H)
    torch.testing.assert_close(constant, holdfast.gated_delta_rule(**arguments, **options)[0])


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_the_gradient_of_a_constant_decay_is_summed_before_it_is_rounded(name):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 512, 2, 16, generator=draw).bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    rest = {"beta": torch.rand(2, 512, 2, generator=draw)} if name == "gated_delta_rule" else {}

    def gradient(wide):
        g = torch.tensor([-0.02, -0.002]).bfloat16().to(torch.float64 if wide else torch.bfloat16).requires_grad_()
        given = [x.double() if wide else x for x in (q, k, v)]
        o, _ = getattr(holdfast, name)(*given, g=g, **{n: x.double() if wide else x for n, x in rest.items()})
        return torch.autograd.grad(o, g, v.to(o.dtype))[0].double()

    found, exact = gradient(False), gradient(True)
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs()).all(), (found, exact)


@both
def test_half_precision_takes_the_gates_in_float32(name):
    op, arguments = getattr(holdfast, name), raw(name, torch.bfloat16)
    wide = by_hand({key: x.float() for key, x in arguments.items()}, True)
    wide = {key: x.bfloat16() if key in ("q", "k", "v") else x for key, x in wide.items()}
    narrow = {key: x.bfloat16() if key in ("beta", "g") else x for key, x in wide.items()}
    got, _ = op(**arguments, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
    expected, rounded = op(**wide)[0], op(**narrow)[0]
    assert got.dtype == torch.bfloat16
    assert (got - expected).norm() < 0.1 * (rounded - expected).norm()


@both
def test_a_step_takes_the_options(name):
    arguments = {key: x[:, :1] if x.dim() > 2 else x for key, x in raw(name).items()}
    options = {"qk_l2norm": True, "beta_sigmoid": True}
    state = raw(name)["initial_state"]
    o, after = getattr(holdfast, name)(**arguments | {"initial_state": state}, **options, output_final_state=True)
    del arguments["initial_state"]
    got = holdfast.step(name, arguments | options, state)
    torch.testing.assert_close(got, o)
    torch.testing.assert_close(state, after)


def test_options_compile_into_one_graph():
    arguments = raw("gated_delta_rule", torch.float32)

    def loss(a):
        o, _ = holdfast.gated_delta_rule(**a, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
        return o, None

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(values_and_grads(compiled, arguments), values_and_grads(loss, arguments), 1e-6)


def test_options_that_contradict_are_refused():
    arguments = raw("gated_delta_rule")
    with pytest.raises(ValueError, match="allow_neg_eigval: expected beta_sigmoid=True"):
        holdfast.gated_delta_rule(**arguments, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="dt_bias: expected A_log beside it"):
        holdfast.gated_delta_rule(**arguments | {"A_log": None})
    with pytest.raises(ValueError, match=r"A_log: expected shape \[H=4\]; got \[3\]"):
        holdfast.gated_delta_rule(**arguments | {"A_log": arguments["A_log"][:3]})
