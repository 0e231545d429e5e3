"""How the fuzzer calls a mixer: whole or in two halves, at several lengths and batches, token by token."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast.fuzz import modules
from holdfast.fuzz.modules import MODULES, ModuleCase, module_calls
from holdfast.fuzz.scenario import Scenario

S = Scenario("nn.GLA", "cpu", 3, B=2, T=5, D=4)


class Kept(nn.Module):
    """A weight, and a note of each call: shape of x, state, offsets."""

    backend = None

    def __init__(self, *_):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.full((4,), 2.0)), []

    def forward(self, x, state=None, cu=None):
        self.calls.append((tuple(x.shape[:2]), state, None if cu is None else cu.tolist()))
        return x * self.weight, f"after {x.shape[1]}"

    def step(self, x, state):
        self.calls.append((tuple(x.shape[:2]), state, "step"))
        return x * self.weight


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({}, [((2, 5), None, None)]),
        ({"state": True}, [((2, 2), None, None), ((2, 3), "after 2", None)]),
        ({"state": True, "T": 1}, [((2, 1), None, None)]),
        ({"state": True, "B": 1, "cu": (0, 2, 5)}, [((1, 5), None, [0, 2, 5])]),
    ],
)
def test_a_pass_is_whole_or_in_halves(change, calls):
    module = Kept()
    case = ModuleCase(replace(S, **change), 0, module)
    found = case.both_passes(module, module, case.x, case.grad)
    assert module.calls == calls
    torch.testing.assert_close(found["y"], 2 * case.x.detach())
    torch.testing.assert_close(found["dx"], 2 * case.grad)
    torch.testing.assert_close(found["dweight"], (case.x * case.grad).sum((0, 1)).detach())


@pytest.mark.parametrize(("T", "prompt", "steps"), [(5, 2, 3), (1, 0, 1), (40, 24, 16)])
def test_the_second_half_is_decoded_token_by_token_but_no_more_than_16(T, prompt, steps):
    module = Kept()
    y = ModuleCase(replace(S, T=T), 0, module).by_steps()["y"]
    assert module.calls == [((2, prompt), None, None), *[((2, 1), f"after {prompt}", "step")] * steps]
    assert y.shape == (2, T, 4)


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ({"mode": "lengths"}, [(2, 5), (2, 6), (3, 6), (2, 5)]),
        ({"mode": "step"}, [(2, 5), (2, 6), (3, 6), (2, 5)]),
        ({"mode": "lengths", "B": 1, "cu": (0, 2, 5)}, [(1, 5), (1, 6), (1, 6), (1, 5)]),
    ],
)
def test_calls_of_several_sizes(change, sizes, monkeypatch):
    monkeypatch.setitem(MODULES, "nn.GLA", Kept)
    results = module_calls(replace(S, **change))
    assert [tuple(result.values["y"].shape[:2]) for result in results] == sizes
    # each of values of its own, of which the float64 run says the same
    assert len({result.values["y"].sum().item() for result in results}) == 4
    assert all(torch.allclose(r.values["y"].double(), r.case.exact()["y"]) for r in results)


def test_the_compiler_is_named_by_the_scenario(monkeypatch):
    monkeypatch.setattr(modules, "compile_here", lambda: None)
    assert [modules.compiler(replace(S, options=words)) for words in ((), ("inductor",))] == ["aot_eager", "inductor"]
