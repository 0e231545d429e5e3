"""Hopper's kernels get states at multiples of 16 bytes, as they are compiled to find them, wherever they were."""

import pytest
import torch

from kernels.matrix.delta_rule.hopper import test_backward as test_hopper_delta_gradients
from kernels.matrix.mlstm.hopper import test_backend as test_hopper_mlstm
from kernels.matrix.scalar_decay.hopper import test_backend as test_hopper
from kernels.matrix.vector_decay.hopper import test_backend as test_hopper_gla
from plain_launches import launch_by


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
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward as hopper_delta_passes
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch
    from holdfast.kernels.matrix.mlstm.hopper import launch as hopper_mlstm_launch
    from holdfast.kernels.matrix.scalar_decay.hopper import launch as scalar_launch
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    modules = [scalar_launch, state_launch, hopper_gla_launch, hopper_mlstm_launch]
    modules += [hopper_delta_launch, hopper_delta_passes]
    launches = recorded(monkeypatch, *modules)
    launch_by(monkeypatch, lambda *_: None)
    backend, plans, call = given()
    call = call._replace(initial_state=shifted(call.initial_state))
    assert call.initial_state.data_ptr() % 16
    o, final, *kept = backend.forward(plans[0], call, None)
    backend.backward(plans[1], call, None, torch.ones_like(o), shifted(final), *((o, *kept) if kept else ()))
    given_to = [x for launch in launches for x in launch.arguments if isinstance(x, torch.Tensor)]
    states = [x for x in given_to if x.numel() == final.numel()]
    assert len(states) >= 3
    assert all(x.data_ptr() % 16 == 0 for x in given_to)
