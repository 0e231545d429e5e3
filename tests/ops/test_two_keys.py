"""gdn2, comba, gated_delta_product and rwkv7: what their ops add to the family's call."""

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.ops import step
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import assert_close, relative_error

SIZES = {"B": 2, "T": 70, "H": 4, "Hq": 2, "K": 8, "V": 6}
NEW = ("gdn2", "comba", "gated_delta_product", "rwkv7")


def example(name, dtype=torch.float64, **sizes):
    return RECURRENCES[name].example(Draw(0, dtype), Sizes(**(SIZES | sizes)))


def run(name, arguments, **options):
    return getattr(holdfast, name)(**arguments, output_final_state=True, **options)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def test_gdn2_with_one_number_for_both_gates_is_kda():
    a = example("gdn2")
    beta = torch.rand(2, 70, 4, dtype=torch.float64)
    b, w = (beta[..., None].expand(2, 70, 4, n) for n in (8, 6))
    right = run("kda", {key: a[key] for key in ("q", "k", "v", "g", "initial_state")} | {"beta": beta})
    assert_close(run("gdn2", a | {"b": b, "w": w}), right, 1e-12)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gdn2_takes_kdas_gate_and_lengths(bound):
    a, draw = example("gdn2"), Draw(1, torch.float64)
    raw = a | {"g": draw.normal(2, 70, 4, 8), "A_log": draw.normal(4), "dt_bias": draw.normal(4, 8)}
    moved = raw["g"] + raw["dt_bias"]
    rate = raw["A_log"].exp()[:, None]
    g = -rate * F.softplus(moved) if bound is None else bound * torch.sigmoid(rate * moved)
    right = run("gdn2", a | {"g": g, "q": unit(a["q"]), "k": unit(a["k"])})
    assert_close(run("gdn2", raw, lower_bound=bound, qk_l2norm=True), right, 1e-12)


def test_comba_without_decay_and_with_the_key_for_p_is_the_delta_rule():
    a = example("comba")
    given = {key: a[key] for key in ("q", "k", "v", "beta", "initial_state")}
    right = run("delta_rule", given)
    assert_close(run("comba", given | {"p": a["k"], "g": torch.zeros_like(a["g"])}), right, 1e-12)


def test_comba_normalises_its_three_keys_and_its_strength_is_1_by_default():
    a = example("comba")
    lengths = {key: 3 * a[key] for key in ("q", "k", "p")}
    right = run("comba", a | {key: unit(x) for key, x in lengths.items()} | {"beta": torch.ones_like(a["beta"])})
    assert_close(run("comba", a | lengths | {"beta": None}, qk_l2norm=True), right, 1e-12)


def test_comba_reads_the_state_before_its_decay():
    """A first token whose decay forgets everything still takes away what the state has for p."""
    a = example("comba", T=1, B=1, H=1, Hq=1)
    a["g"] = torch.full((1, 1, 1), -torch.inf, dtype=torch.float64)
    S, k, p, v = a["initial_state"][0, 0], a["k"][0, 0, 0], a["p"][0, 0, 0], a["v"][0, 0, 0]
    _, state = run("comba", a)
    assert relative_error(state[0, 0], a["beta"].item() * torch.outer(k, v - p @ S)) <= 1e-12


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_gated_delta_product_takes_writes_one_behind_another(n, backend):
    draw = Draw(0, torch.float64)
    k, v, beta = draw.unit(2, 30, n, 2, 8), draw.normal(2, 30, n, 4, 6), draw.gate(2, 30, n, 4)
    a = example("gated_delta_product", T=30) | {"k": k, "v": v, "beta": beta}
    flat = {key: x.flatten(1, 2) for key, x in (("k", k), ("v", v), ("beta", beta))}
    right = run("gated_delta_product", a, backend=backend)
    got = run("gated_delta_product", a | flat, num_householder=n, backend=backend)
    assert all(map(torch.equal, got, right))
    if n == 1:
        assert_close(right, run("gated_delta_rule", {**a, **flat}), 1e-12)


def test_gated_delta_product_without_decay_and_with_all_options():
    a = example("gated_delta_product")
    zero = run("gated_delta_product", a | {"g": torch.zeros_like(a["g"])})
    assert_close(run("gated_delta_product", a | {"g": None}), zero, 1e-12)
    draw = Draw(1, torch.float64)
    raw = {"g": draw.normal(2, 70, 4), "beta": draw.normal(2, 70, 2, 4)}
    gate = {"A_log": draw.normal(4), "dt_bias": draw.normal(4)}
    made = {
        "g": -gate["A_log"].exp() * F.softplus(raw["g"] + gate["dt_bias"]),
        "beta": 2 * raw["beta"].sigmoid(),
        "q": unit(a["q"]),
        "k": unit(3 * a["k"]),
    }
    right = run("gated_delta_product", a | made)
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    assert_close(run("gated_delta_product", a | raw | gate | {"k": 3 * a["k"]}, **options), right, 1e-12)


def test_rwkv7_that_reads_nothing_is_gla():
    a = example("rwkv7")
    given = {"q": a["r"], "k": a["k"], "v": a["v"], "g": a["w"], "initial_state": a["initial_state"]}
    right = run("gla", given, scale=0.7)
    assert_close(run("rwkv7", a | {"a": torch.zeros_like(a["a"])}, scale=0.7), right, 1e-12)


@pytest.mark.parametrize("name", NEW)
def test_offsets_count_tokens(name):
    a = example(name, B=1)
    offsets, states = torch.tensor([0, 13, 13, 70]), Draw(2, torch.float64).state(3, 4, 8, 6)
    o, final = run(name, a | {"initial_state": states}, cu_seqlens=offsets)
    for n, (start, end) in enumerate(((0, 13), (13, 13), (13, 70))):
        timed = {key: x[:, start:end] for key, x in a.items() if key != "initial_state"}
        part, last = run(name, timed | {"initial_state": states[n, None]})
        assert_close([o[:, start:end], final[n, None]], [part, last], 1e-12)


@pytest.mark.parametrize("name", NEW)
def test_steps_are_the_whole(name):
    a = example(name, T=5)
    o, final = run(name, a)
    state = a.pop("initial_state").clone()
    steps = [step(name, {key: x[:, t : t + 1] for key, x in a.items()}, state) for t in range(5)]
    assert_close([torch.cat(steps, 1), state], [o, final], 1e-12)
    with pytest.raises(ValueError, match=r"one token \(T = 1\); got T = 5"):
        step(name, a, state)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gdn2", {"b": torch.zeros(2, 70, 2, 8)}, r"b: expected shape \[B=2, T=70, H=4, K=8\]; got \[2, 70, 2, 8\]"),
        ("gdn2", {"lower_bound": 1.0}, "lower_bound: expected a number below 0"),
        ("comba", {"p": torch.zeros(2, 70, 4, 8).double()}, r"p: expected shape .*Hq=2.* got \[2, 70, 4, 8\]"),
        ("gated_delta_product", {"num_householder": 3}, r"k: expected shape \[B, T \* 3, \.\.\.\]; got"),
        ("gated_delta_product", {"num_householder": 0}, "num_householder: expected a positive integer; got 0"),
        ("gated_delta_product", {"v": torch.zeros(2, 70, 3, 4, 6).double()}, r"v: expected shape .*n=2.*got"),
        ("rwkv7", {"a": torch.zeros(2, 70, 4, 8).double()}, r"a: expected shape .*got \[2, 70, 4, 8\]"),
    ],
)
def test_what_does_not_fit_is_named(name, change, message):
    with pytest.raises(ValueError, match=message):
        run(name, example(name) | change)


def test_writes_that_are_no_whole_tokens_are_refused():
    a = example("gated_delta_product")
    flat = {key: a[key].flatten(1, 2) for key in ("k", "v", "beta")}
    with pytest.raises(ValueError, match=r"k: expected shape \[B, T \* 3, \.\.\.\]; got \[2, 140, 2, 8\]"):
        run("gated_delta_product", a | flat, num_householder=3)
    with pytest.raises(TypeError, match="num_householder: expected an integer; got float"):
        run("gated_delta_product", a | flat, num_householder=2.0)
    with pytest.raises(TypeError, match=r"g: expected a tensor .* beside A_log; got None"):
        run("gated_delta_product", a | {"g": None}, A_log=torch.zeros(4, dtype=torch.float64))
