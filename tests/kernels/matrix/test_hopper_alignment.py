"""Hopper's kernels get states at multiples of 16 bytes, as they are compiled to find them, wherever they were."""

import pytest
import torch

from kernels.matrix import test_hopper, test_hopper_delta_gradients, test_hopper_gla, test_hopper_mlstm


def shifted(x):
    """x, four bytes past where memory begins."""
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def scalar():
    call = test_hopper.example(T=130)
    return test_hopper.Hopper(), [found[0].plan for found in test_hopper.plans_of(call)], call


def vector():
    return test_hopper_gla.HopperGLA(), test_hopper_gla.PLANS, test_hopper_gla.given(T=130)


def normalized():
    call = test_hopper_mlstm.example(T=130)
    return test_hopper_mlstm.HopperMLSTM(), [found.plan for found in test_hopper_mlstm.plans_of(call)], call


def delta():
    call = test_hopper_delta_gradients.example(T=130)
    plans = test_hopper_delta_gradients.plans(call)
    return test_hopper_delta_gradients.HopperDelta(), plans, call


@pytest.mark.parametrize("given", [scalar, vector, normalized, delta])
def test_states_anywhere_in_memory_reach_the_kernels_aligned(given, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import recorded
    from holdfast.kernels.common import triton_launch
    from holdfast.kernels.matrix import (
        hopper_delta_launch,
        hopper_delta_passes,
        hopper_gla_launch,
        hopper_launch,
        hopper_mlstm_launch,
    )

    modules = hopper_launch, hopper_gla_launch, hopper_mlstm_launch, hopper_delta_launch, hopper_delta_passes
    launches = recorded(monkeypatch, *modules)
    monkeypatch.setattr(triton_launch, "launch", lambda *_: None)
    backend, plans, call = given()
    call = call._replace(initial_state=shifted(call.initial_state))
    assert call.initial_state.data_ptr() % 16
    o, final, *kept = backend.forward(plans[0], call, None)
    backend.backward(plans[1], call, None, torch.ones_like(o), shifted(final), *((o, *kept) if kept else ()))
    given_to = [x for launch in launches for x in launch.arguments if isinstance(x, torch.Tensor)]
    states = [x for x in given_to if x.numel() == final.numel()]
    assert len(states) >= 3
    assert all(x.data_ptr() % 16 == 0 for x in given_to)
