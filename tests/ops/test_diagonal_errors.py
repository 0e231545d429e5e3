"""Bad input to the diagonal family's ops, one mistake at a time."""

import pytest
import torch

import holdfast
from holdfast.recurrences import RECURRENCES, Draw, Sizes

B, T, D = 2, 5, 6


def example(name):
    return RECURRENCES[name].example(Draw(), Sizes(B=B, T=T, D=D))


SHARED = {
    "x of the wrong rank": ({"x": torch.zeros(B, D)}, ValueError, r"x: expected shape \[B, T, D\]; got \[2, 6\]"),
    "x a number": ({"x": 1.0}, TypeError, "x: expected a tensor; got float"),
    "x missing": ({"x": None}, TypeError, r"x: expected a tensor \[B, T, D\]; got None"),
    "x of integers": ({"x": torch.zeros(B, T, D, dtype=torch.int64)}, TypeError, "x: .*got torch.int64"),
    "no channels": ({"x": torch.zeros(B, T, 0)}, ValueError, r"x: expected D > 0 in \[B, T, D\]; got \[2, 5, 0\]"),
    "state of the wrong shape": (
        {"initial_state": torch.zeros(B + 1, D)},
        ValueError,
        r"initial_state: expected shape \[sequences=2, D=6\]; got \[3, 6\]",
    ),
    "state of the wrong dtype": (
        {"initial_state": torch.zeros(B, D, dtype=torch.bfloat16)},
        TypeError,
        "initial_state: expected torch.float32; got torch.bfloat16",
    ),
    "state on another device": (
        {"initial_state": torch.zeros(B, D, device="meta")},
        ValueError,
        "initial_state: expected device cpu, .*; got meta",
    ),
    "batch beside cu_seqlens": (
        {"cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        "cu_seqlens: expected packed inputs with B = 1; got B = 2",
    ),
    "cu_seqlens of floats": (
        {"cu_seqlens": torch.tensor([0.0, 5.0])},
        TypeError,
        "cu_seqlens: expected torch.int32 or torch.int64; got torch.float32",
    ),
    "unknown backend": (
        {"backend": "magic"},
        ValueError,
        "backend: expected one of 'hopper', 'triton', 'chunked', 'reference' for",
    ),
}
GATE = {
    "gate of the wrong length": (lambda g: g[:, 1:], ValueError, r"{key}: expected shape .*T=5.*; got \[2, 4, "),
    "gate of the wrong width": (lambda g: g[..., 1:], ValueError, r"{key}: expected shape .*=.*; got \[2, 5, "),
    "gate of the wrong rank": (lambda g: g[0], ValueError, r"{key}: expected shape .*; got \[5, "),
    "gate of integers": (lambda g: g.long(), TypeError, "{key}: expected a floating-point dtype; got torch.int64"),
    "gate missing": (lambda g: None, TypeError, "{key}: expected a tensor .*; got None"),
}


@pytest.mark.parametrize("name", ["rglru", "rotlru", "hgrn"])
@pytest.mark.parametrize("mistake", SHARED)
def test_a_mistake_is_named(name, mistake):
    wrong, error, message = SHARED[mistake]
    with pytest.raises(error, match=message):
        getattr(holdfast, name)(**example(name) | wrong)


@pytest.mark.parametrize(("name", "key"), [("rglru", "a"), ("rotlru", "a"), ("rotlru", "theta"), ("hgrn", "g")])
@pytest.mark.parametrize("mistake", GATE)
def test_a_mistake_in_a_gate_is_named(name, key, mistake):
    change, error, message = GATE[mistake]
    arguments = example(name)
    with pytest.raises(error, match=message.replace("{key}", key)):
        getattr(holdfast, name)(**arguments | {key: change(arguments[key])})


def test_an_odd_number_of_channels_has_no_pairs():
    arguments = RECURRENCES["rglru"].example(Draw(), Sizes(B=B, T=T, D=7))
    with pytest.raises(ValueError, match=r"x: expected an even D; got D = 7 in \[2, 5, 7\]"):
        holdfast.rotlru(theta=arguments["a"], **arguments)


def test_pairs_have_half_as_many_gates_as_channels():
    arguments = example("rotlru")
    arguments["a"] = arguments["x"]
    with pytest.raises(ValueError, match=r"a: expected shape \[B=2, T=5, D/2=3\]; got \[2, 5, 6\]"):
        holdfast.rotlru(**arguments)


@pytest.mark.parametrize("name", ["rglru", "rotlru", "hgrn"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4, 2, 5], "cu_seqlens: expected offsets that do not decrease; got 4 then 2 at 2"),
        ([0, 4], "cu_seqlens: expected offsets from 0 to T = 5; got 0 to 4"),
        ([1, 5], "cu_seqlens: expected offsets from 0 to T = 5; got 1 to 5"),
    ],
)
def test_offsets_that_cannot_be(name, backend, bounds, message):
    arguments = RECURRENCES[name].example(Draw(), Sizes(B=1, T=T, D=D))
    del arguments["initial_state"]
    with pytest.raises(ValueError, match=message):
        getattr(holdfast, name)(**arguments, cu_seqlens=torch.tensor(bounds), backend=backend)
