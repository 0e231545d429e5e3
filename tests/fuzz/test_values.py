"""The values that scenarios have: of the kinds and in the shares that docs/fuzzing.md names, laid out as it says."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from holdfast.fuzz import modes
from holdfast.fuzz.case import Case
from holdfast.fuzz.layout import LAYOUTS, is_writable, lay_out, one_of_all, poison
from holdfast.fuzz.misuse import misuse
from holdfast.fuzz.scenario import Scenario
from holdfast.fuzz.source import Source
from holdfast.fuzz.subjects import SUBJECTS, options

MANY = 20_000
# so many values that a share is within two hundredths of what it should be
S = Scenario("simple_gla", "cpu", 3, B=4, T=250, H=8, Hq=4, K=16, V=16, D=16, state=True)
SMALL = Scenario("simple_gla", "cpu", 3, B=2, T=5, H=2, Hq=1, K=4, V=4, options=("g",), state=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(s):
    return {name: value.x for name, value in SUBJECTS[s.op].draw(s, Source(7)).items()}


def share(found):
    return pytest.approx(found.double().mean().item(), abs=0.02)


def quantiles(x, *at):
    return torch.quantile(x.flatten()[:MANY].double(), torch.tensor(at, dtype=torch.float64)).tolist()


def test_choices_are_all_of_them_and_a_seed_repeats():
    source = Source(1)
    assert {source.integer(3) for _ in range(50)} == {0, 1, 2}
    assert {source.choose("abc") for _ in range(50)} == set("abc")
    assert torch.equal(Source(5).normal(3), Source(5).normal(3))
    assert not torch.equal(Source(5).normal(3), Source(6).normal(3))
    assert quantiles(Source(1).uniform(MANY), 0, 0.5, 1) == pytest.approx([0, 0.5, 1], abs=0.01)
    found = [one_of_all(source) for _ in range(400)]
    assert set(found) == set(LAYOUTS)
    assert 0.4 < found.count("plain") / 400 < 0.7


def test_decays_by_strength():
    """At quantiles of the normal numbers that they are made of, -1, 0 and 1."""
    at = (0.15866, 0.5, 0.84134)
    mild = F.logsigmoid(torch.tensor([2.0, 3.0, 4.0])).tolist()
    strong = (-torch.tensor([2.5, 1.0, -0.5]).exp()).tolist()
    of = {name: Source(1).log_decay(name, MANY) for name in ("mild", "weak", "zero", "strong", "inf", "mixed")}
    assert quantiles(of["mild"], *at) == pytest.approx(mild, rel=0.05)
    assert quantiles(of["weak"], *at) == pytest.approx([x * 1e-3 for x in mild], rel=0.05)
    assert quantiles(of["strong"], *at) == pytest.approx(strong, rel=0.05)
    assert not of["zero"].any()
    gone = of["inf"].isneginf()
    assert gone.double().mean() == pytest.approx(0.06, abs=0.01)
    assert quantiles(of["inf"][~gone], *at) == pytest.approx(mild, rel=0.05)
    # beside each other: strong and mild ones, none at all, very strong ones and the end of everything
    mixed = of["mixed"]
    shares = [(mixed == value).double().mean().item() for value in (0.0, -1e4, -torch.inf)]
    assert shares == pytest.approx([0.13, 0.04, 0.03], abs=0.006)
    rest = mixed[(mixed < 0) & (mixed > -1e4)]
    below = torch.tensor([(of["mild"] < -1).double().mean(), (of["strong"] < -1).double().mean()])
    assert share(rest < -1) == pytest.approx((0.5 * below[0] + 0.3 * below[1]).item() / 0.8, abs=0.01)
    assert all((x <= 0).all() for x in of.values())


def test_sizes_of_inputs():
    normal = Source(1).sized("normal", False, 100, 20, 50)
    assert normal.std() == pytest.approx(1, abs=0.02)
    assert torch.equal(Source(1).sized("large", False, 100, 20, 50), normal * 64)
    # what float16 can hold the products of
    assert torch.equal(Source(1).sized("large", True, 100, 20, 50), normal * 8)
    torch.testing.assert_close(Source(1).sized("small", False, 100, 20, 50), normal / 100)
    sparse = Source(1).sized("sparse", False, 100, 20, 50)
    # whole tokens
    empty = (sparse == 0).all(-1)
    assert 0.45 < empty.double().mean() < 0.55
    assert torch.equal(sparse[~empty], normal[~empty])
    assert torch.equal(Source(1).sized("sparse", False, 100, 20), Source(1).normal(100, 20))


@pytest.mark.parametrize(
    ("layout", "holds"),
    [
        ("plain", lambda x, y: y.is_contiguous() and y.storage_offset() == 0),
        ("offset", lambda x, y: y.is_contiguous() and y.storage_offset() in (1, 3, 7)),
        ("padded", lambda x, y: y.stride(-2) - 5 in (1, 3, 8) and y.storage_offset() == 0),
        ("inner", lambda x, y: (y.stride(-2) - 5 - y.storage_offset() in (1, 3, 8)) and y.storage_offset() in (1, 8)),
        ("transposed", lambda x, y: y.transpose(1, 2).is_contiguous() and not y.is_contiguous()),
        ("reversed", lambda x, y: y.stride() == (12, 4, 1, 24)),
        ("stepped", lambda x, y: y.stride() == (120, 40, 10, 2)),
        ("every_other", lambda x, y: y.stride() == (120, 40, 5, 1) and y.storage_offset() == 0),
        ("negated", lambda x, y: y.is_neg()),
    ],
)
def test_layouts(layout, holds):
    x = torch.randn(2, 3, 4, 5)
    found = [lay_out(x, layout, Source(seed)) for seed in range(12)]
    assert all(torch.equal(y, x) and holds(x, y) and is_writable(y) for y in found)
    assert lay_out(x[0, 0, 0, 0], layout, Source(0)) is not None
    # with fewer axes it is what it can be
    assert torch.equal(lay_out(x[0, 0, 0], layout, Source(0)), x[0, 0, 0])
    assert lay_out(x.long(), layout, Source(0)).dtype == torch.int64


def test_an_expanded_tensor_has_one_axis_of_stride_0():
    x = torch.randn(2, 1, 4)
    found = [lay_out(x, "expanded", Source(seed)) for seed in range(12)]
    assert {tuple(y.stride()).index(0) for y in found} == {0, 2}
    assert all(y.shape == x.shape and not is_writable(y) for y in found)
    assert is_writable(lay_out(torch.ones(1, 1), "expanded", Source(0)))
    assert is_writable(torch.ones(1, 0, 3).expand(4, 0, 3))


def test_memory_that_was_freed_holds_nan():
    blocks = []
    full = torch.full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "full", lambda *given, **more: blocks.append(full(*given, **more)) or blocks[-1])
        poison(torch.device("cpu"))
    assert [x.numel() for x in blocks] == [2**n for n in range(7, 17) for _ in range(2)]
    assert all(x.isnan().all() for x in blocks)


def test_keys_states_and_inputs_of_the_matrix_family():
    given = drawn(S)
    assert {name: x.shape for name, x in given.items()} == {
        "q": (4, 250, 4, 16), "k": (4, 250, 4, 16), "v": (4, 250, 8, 16), "initial_state": (4, 8, 16, 16),
    }  # fmt: skip
    norms = {keys: drawn(replace(S, keys=keys))["k"].norm(dim=-1) for keys in ("unit", "model", "raw")}
    torch.testing.assert_close(norms["unit"], torch.ones_like(norms["unit"]))
    assert norms["raw"].square().mean() == pytest.approx(16, rel=0.02)
    assert norms["model"].square().mean() == pytest.approx(1, rel=0.02)
    large = drawn(replace(S, values="large", dtype="float16"))
    assert (large["v"].std(), large["initial_state"].std()) == (pytest.approx(8, rel=0.03), pytest.approx(8, rel=0.03))
    assert drawn(replace(S, values="large"))["v"].std() == pytest.approx(64, rel=0.03)
    assert drawn(S)["initial_state"].std() == pytest.approx(1, rel=0.03)
    assert "initial_state" not in drawn(replace(S, state=False))
    assert [drawn(replace(S, options=(word,)))["g"].shape for word in ("g", "g1")] == [(4, 250, 8), (8,)]
    assert drawn(replace(S, op="gla"))["g"].shape == (4, 250, 8, 16)


def test_steps_and_rates_of_ssd():
    s = replace(S, op="ssd")
    given = drawn(s)
    assert quantiles(given["dt"], 0.15866, 0.5, 0.84134) == pytest.approx([0.269, 0.5, 0.731], abs=0.01)
    soft = drawn(replace(s, options=("softplus",)))["dt"]
    assert (soft.mean(), soft.std()) == (pytest.approx(-1, abs=0.02), pytest.approx(1, abs=0.02))
    # a fifth of the steps do next to nothing
    mixed = {words: drawn(replace(s, strength="mixed", options=words))["dt"] for words in ((), ("softplus",))}
    assert share(mixed[()] == 0) == 0.2
    assert share(mixed["softplus",] == -40) == 0.2
    rates = {"mild": 1, "strong": 16, "inf": 1e4, "mixed": 100, "weak": 1e-3}
    for strength, rate in rates.items():
        A = drawn(replace(s, strength=strength, H=1000, B=1, T=1, options=("AN",)))["A"]
        assert A.shape == (1000, 16)
        assert (A.min().item(), A.mean().item()) == (pytest.approx(-rate, rel=0.01), pytest.approx(-rate / 2, rel=0.05))
    assert not drawn(replace(s, strength="zero"))["A"].any()
    assert given["A"].shape == (8,)
    assert given["C"].norm(dim=-1).square().mean() == pytest.approx(1, rel=0.02)
    words = ("D", "z", "dt_bias")
    assert {name: x.shape for name, x in drawn(replace(s, options=words)).items() if name in words} == {
        "D": (8,), "z": (4, 250, 8, 16), "dt_bias": (8,),
    }  # fmt: skip
    assert drawn(replace(s, options=("DP",)))["D"].shape == (8, 16)
    z = [drawn(replace(s, options=("z",), strength=strength))["z"].std() for strength in ("mild", "strong")]
    assert z == [pytest.approx(1, rel=0.02), pytest.approx(8, rel=0.02)]


def test_write_strengths_of_the_delta_rules():
    """Between 0 and 1, all 1, 0 or 1, all 0, and with keys that are as long as 1 up to 2."""
    s, found = replace(S, op="delta_rule", K=1, V=1, state=False), {}
    for seed in range(60):
        beta = SUBJECTS["delta_rule"].draw(s, Source(seed))["beta"].x
        values = set(beta.unique().tolist()) if len(beta.unique()) < 3 else "twice" if beta.max() > 1 else "open"
        found[str(values)] = beta
    assert set(found) == {"{1.0}", "{0.0}", "{0.0, 1.0}", "twice", "open"}
    assert share(found["{0.0, 1.0}"]) == 0.5
    assert (found["open"].mean(), found["twice"].mean()) == (pytest.approx(0.5, abs=0.01), pytest.approx(1, abs=0.02))
    assert 1.9 < found["twice"].max() < 2
    raw = [SUBJECTS["delta_rule"].draw(replace(s, keys="raw"), Source(seed))["beta"].x.max() for seed in range(60)]
    assert max(raw) <= 1
    stds = [drawn(replace(s, options=("sig",), strength=of))["beta"].std() for of in ("mild", "mixed")]
    assert stds == [pytest.approx(1, rel=0.03), pytest.approx(10, rel=0.03)]


def test_gates_of_the_gated_delta_rule():
    s = replace(S, op="gated_delta_rule", H=2000, T=1, B=1, Hq=1)
    means = {
        strength: drawn(replace(s, options=("A_log", "dt_bias"), strength=strength))["A_log"].mean().item()
        for strength in ("mild", "strong", "weak")
    }
    assert means == pytest.approx({"mild": 0, "strong": 4, "weak": -6}, abs=0.1)
    given = drawn(replace(s, options=("A_log", "dt_bias")))
    assert {name: given[name].shape for name in ("A_log", "dt_bias", "g")} == {
        "A_log": (2000,), "dt_bias": (2000,), "g": (1, 1, 2000),
    }  # fmt: skip
    assert [drawn(replace(s, options=words))["g"].shape for words in ((), ("g1",))] == [(1, 1, 2000), (2000,)]


@pytest.mark.parametrize(
    ("strength", "i", "f"),
    [("mild", (-1, 0, 1), (2, 3, 4)), ("weak", (-11, -10, -9), (5, 6, 7)), ("zero", (0, 0, 0), (20, 20, 20))],
)
def test_gates_of_mlstm(strength, i, f):
    given = drawn(replace(S, op="mlstm", strength=strength))
    at = (0.15866, 0.5, 0.84134)
    assert quantiles(given["i"], *at) == pytest.approx(i, abs=0.05)
    assert quantiles(given["f"], *at) == pytest.approx(f, abs=0.05)
    assert {name: given[name].shape for name in "Cnm"} == {"C": (4, 8, 16, 16), "n": (4, 8, 16), "m": (4, 8)}


def test_gates_of_mlstm_that_open_and_shut():
    given = {strength: drawn(replace(S, op="mlstm", strength=strength)) for strength in ("strong", "inf", "mixed")}
    i, f = given["strong"]["i"], given["strong"]["f"]
    assert quantiles(i.abs(), 0.5) == pytest.approx([20], abs=0.1)
    assert share(i > 0) == 0.5
    assert (f.mean(), f.std()) == (pytest.approx(0, abs=0.1), pytest.approx(8, rel=0.02))
    assert given["inf"]["i"].mean() == pytest.approx(20, abs=0.05)
    assert share(given["inf"]["f"] == -100) == 0.06
    assert share(given["mixed"]["i"].abs() == 20) == 0.2
    assert share(given["mixed"]["f"] == -20) == 0.2


@pytest.mark.parametrize(("strength", "saturated"), [("strong", 0.5), ("mixed", 0.1), ("mild", 0.0)])
def test_gates_of_a_cell(strength, saturated):
    s = replace(S, op="lstm", B=4, H=4, strength=strength, options=("b", "reset"))
    given = drawn(s)
    assert {name: x.shape for name, x in given.items()} == {
        "x": (4, 250, 4, 4, 16), "R": (4, 4, 16, 16), "b": (4, 4, 16), "reset": (4, 250),
        "initial_state": (2, 4, 4, 16),
    }  # fmt: skip
    assert share(given["x"].abs() == 20) == saturated
    assert share(given["x"] == 20) == pytest.approx(saturated / 2, abs=0.01)
    # as small as keeps a state of D channels from growing
    assert given["R"].square().sum(-1).mean() == pytest.approx(1 / 3, rel=0.1)


def test_recurrent_weights_may_be_none_or_small_and_a_normaliser_holds_something():
    s = replace(S, op="slstm", B=4, H=4)
    sizes = {of: drawn(replace(s, strength=of))["R"].std().item() for of in ("mild", "zero", "weak")}
    assert sizes["weak"] == 0
    assert sizes["zero"] == pytest.approx(sizes["mild"] / 10, rel=1e-5)
    state = drawn(s)["initial_state"]
    assert state[2].min() >= 1
    assert all(state[n].min() < 0 for n in (0, 1, 3))
    assert drawn(replace(s, values="large"))["x"].std() == pytest.approx(8, rel=0.02)


def test_resets_come_now_and_then_and_at_times_before_each_chunk():
    shares, regular = set(), set()
    for seed in range(30):
        reset = SUBJECTS["lstm"].draw(replace(S, op="lstm", H=1, D=2, options=("reset",)), Source(seed))["reset"].x
        regular.add(bool(reset[:, 32::32].all()))
        others = torch.ones(250, dtype=torch.bool)
        others[::32] = False
        shares.add(round(reset[:, others].double().mean().item(), 1))
    assert (shares, regular) == ({0.0, 0.1, 0.3} & shares, {True, False})
    assert 0.3 in shares
    assert min(shares) <= 0.1


def test_gates_of_the_diagonal_family():
    s = replace(S, op="rglru", D=32)
    signs = {of: (drawn(replace(s, strength=of))["a"] < 0).double().mean().item() for of in ("mild", "strong", "mixed")}
    assert signs["mild"] == 0
    assert 0.3 < signs["mixed"] < 0.5
    assert 0.3 < signs["strong"] < 0.6
    assert drawn(s)["a"].max() <= 1
    assert quantiles(drawn(s)["a"], 0.5) == pytest.approx([torch.tensor(3.0).sigmoid().item()], rel=0.01)
    given = drawn(replace(s, op="rotlru"))
    assert {name: x.shape for name, x in given.items()} == {
        "a": (4, 250, 16), "theta": (4, 250, 16), "x": (4, 250, 32), "initial_state": (4, 32),
    }  # fmt: skip
    turns = {
        round(SUBJECTS["rotlru"].draw(replace(s, op="rotlru"), Source(seed))["theta"].x.std().item())
        for seed in range(20)
    }
    assert turns == {1, 10}


def test_arguments_of_the_norm_the_convolution_and_the_chunk_primitives():
    s = replace(S, op="gated_rms_norm", options=("gate", "w2"))
    shapes = {name: tuple(x.shape) for name, x in drawn(s).items()}
    assert shapes == {"o": (4, 250, 8, 16), "gate": (4, 250, 8, 16), "weight": (8, 16)}
    assert drawn(replace(s, options=("w1",)))["weight"].shape == (16,)
    assert drawn(replace(s, strength="strong"))["gate"].std() == pytest.approx(8, rel=0.02)
    assert drawn(s)["gate"].std() == pytest.approx(1, rel=0.02)
    s = replace(S, op="causal_conv1d", options=("b",), D=1000, T=2)
    shapes = {name: tuple(x.shape) for name, x in drawn(s).items()}
    assert shapes == {"x": (4, 2, 1000), "weight": (1000, 4), "bias": (1000,), "initial_state": (4, 3, 1000)}
    assert drawn(replace(s, options=("taps7",)))["weight"].shape == (1000, 7)
    assert drawn(s)["weight"].square().sum(-1).mean() == pytest.approx(1, rel=0.1)
    assert [drawn(replace(s, strength=of))["bias"].std() for of in ("mild", "strong")] == [
        pytest.approx(1, rel=0.1), pytest.approx(8, rel=0.1),
    ]  # fmt: skip
    s = replace(S, op="inter_chunk_scan", T=20, rank=4, options=("low",))
    given = drawn(s)
    assert given["decay"].shape == (4, 20, 8)
    assert drawn(replace(s, options=("vector",)))["decay"].shape == (4, 20, 8, 16)
    # what is erased is at most all of it
    assert 0.1 < torch.linalg.matrix_norm(given["W"] @ given["Y"].mT, 2).max() <= 1 + 1e-5
    torch.testing.assert_close(given["Y"].norm(dim=-2), torch.ones(4, 20, 8, 4))
    s = replace(S, op="intra_chunk", chunk=64, options=("g", "states", "gate"))
    given = drawn(s)
    assert given["states"].shape == (4, 4, 8, 16, 16)
    assert drawn(replace(s, T=256))["states"].shape[1] == 4
    assert drawn(replace(s, T=257))["states"].shape[1] == 5
    assert given["k"].norm(dim=-1).square().mean() == pytest.approx(1, rel=0.02)
    assert [drawn(replace(s, strength=of))["gate"].std() for of in ("mild", "strong")] == [
        pytest.approx(1, rel=0.02), pytest.approx(8, rel=0.02),
    ]  # fmt: skip


def test_options_in_words():
    assert options(Scenario("lightning", "cpu", 1, options=("layer", "scale"))) == {
        "layer": 2, "scale": 0.3, "num_layers": 5,
    }  # fmt: skip
    for words, expected in {
        "l2 sig neg": {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True},
        "softplus": {"dt_softplus": True},
        "sigmoid unnormalized": {"gating": "sigmoid", "normalize": False},
        "cut center": {"cut_recurrent_grad": True, "center": True},
    }.items():
        assert options(replace(S, options=tuple(words.split()))) == expected


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("plain", [(5, 0)]),
        # the third call on is a replay, and so is the fourth
        ("repeat", [(5, n) for n in range(4)]),
        ("lengths", [(5, 0), (6, 1), (5, 2), (21, 3), (6, 4)]),
        ("retain_graph", [(5, 0), (5, 0), (5, 1)]),
        ("checkpoint", [(5, n) for n in range(3)]),
        ("hooks", [(5, n) for n in range(3)]),
        ("threads", [(5, 0), (5, 1), (5, 2), (6, 3), (6, 4), (6, 5)]),
        ("autocast", [(5, n) for n in range(3)]),
        ("default_dtype", [(5, n) for n in range(3)]),
        ("poison", [(5, n) for n in range(3)]),
        ("inference", [(5, n) for n in range(3)]),
    ],
)
def test_the_calls_of_each_mode(mode, calls):
    """Their lengths, and which set of values each has. The seed is odd: a thread has other lengths."""
    s = replace(SMALL, mode=mode, grads="none" if mode == "inference" else "both")
    found = modes.MODES[mode](replace(s, dtype="bfloat16") if mode == "autocast" else s)
    assert sorted((r.case.n, r.case.s.T, r.which) for r in found) == sorted(
        (n, T, int(mode == "retain_graph" and k == 1)) for k, (T, n) in enumerate(calls)
    )


def test_what_modes_change_is_as_before():
    for mode in ("default_dtype", "poison", "threads"):
        modes.MODES[mode](replace(SMALL, mode=mode))
    assert torch.get_default_dtype() == torch.float32


ALONE = {"state": False, "options": ()}


@pytest.mark.parametrize(
    "change",
    [
        {"options": ("g",)}, {"op": "ssd", "options": ("AN",)}, {"op": "ssd"} | ALONE, {"op": "mlstm"},
        {"op": "lstm"}, {"op": "rglru", "D": 4}, {"op": "retnet", "cu": (0, 2, 2, 5), "B": 1, "options": ()},
        {"op": "inter_chunk_scan", "rank": 2} | ALONE, {"op": "intra_chunk", "chunk": 4} | ALONE,
        {"op": "intra_chunk", "chunk": 4, "state": False, "options": ("gate", "states")},
        {"op": "gated_rms_norm", "D": 4} | ALONE,
        {"op": "gated_rms_norm", "D": 4, "state": False, "options": ("gate",)},
    ],
    ids=str,
)  # fmt: skip
def test_every_wrong_call_is_refused_by_name(change, monkeypatch):
    """All that misuse knows to do to each argument of a call. An axis that no other argument has is not one of them."""
    s = replace(SMALL, D=4, **{"final": change.get("state", True)} | change) if "D" not in change else None
    s = s or replace(SMALL, **{"final": False} | change)
    tried = {}

    def choose(source, among):
        if name is None and "integers" not in among:
            names[:] = among
            return among[0]
        if "integers" not in among:
            return name
        tried.setdefault(name, []).extend(among)
        return among[turn] if turn < len(among) else among[0]

    monkeypatch.setattr("holdfast.fuzz.misuse.Source", lambda seed: SimpleNamespace(choose=partial(choose, None)))
    names, name, turn = [], None, 0
    misuse(s)
    for name in names:
        tried.pop(name, None)
        turn = 0
        while not tried.get(name) or turn < len(set(tried[name])):
            assert misuse(s) == []
            turn += 1
    assert all(len(set(ways)) >= 8 for name, ways in tried.items() if name)
    assert sum("a wider last axis" in ways for ways in tried.values()) >= (len(names) > 1)


def test_each_set_of_values_is_another_and_gradients_too():
    first, again, other = Case(SMALL), Case(SMALL), Case(SMALL, 1)
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert not any(torch.equal(first.tensors[name], other.tensors[name]) for name in first.tensors)
    o, final = torch.zeros(2, 5, 2, 4), torch.zeros(2, 2, 4, 4)
    given = [case.cotangent("o", o, which) for case in (first, other) for which in (0, 1)]
    given += [first.cotangent("final", o, 0), first.cotangent("final", o, 1)]
    assert len({x.sum().item() for x in given}) == len(given)
    assert first.cotangent("final", final, 0).shape == final.shape


def test_some_arguments_need_gradients_and_at_least_one():
    found = {tuple(Case(replace(SMALL, needs="some", seed=seed)).needing) for seed in range(40)}
    assert () not in found
    assert len(found) > 5
    assert Case(SMALL).needing == ["q", "k", "v", "initial_state", "g"]
    assert Case(replace(SMALL, grads="none")).needing == []
