"""Calls of one chunk by scalar decay's sweeps on Hopper, whose first state is not rounded where it is read."""

import pytest
import torch

from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from kernels.matrix.scalar_decay.hopper.test_backend import H200, WIDTHS, example, launches_of, on_cpu, passes, plans_of

__all__ = ["on_cpu"]


@pytest.mark.slow
@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V"), WIDTHS)
def test_the_sweep_of_one_chunk_compiles_and_fits(K, V, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded

    launches = recorded(monkeypatch, *launches_of())
    call = example(T=31, K=K, V=V)
    Hopper().backward(plans_of(call)[1][0].plan, call, None, torch.randn_like(call.v), None)
    assert launches[0].constants["UNROUNDED"]
    made = compile_launch(launches[0], aligned=("added_ptr",))
    assert made.shared <= H200.shared_per_block
    assert "(C75" not in made.notes, "a product waits for the one before it"
    assert made.spilled <= 64


def assert_first_state(K, V, device):
    """Of one chunk: dg of the first token is <S, dS> of the first state, which what is read of it may be all of."""
    call = example(T=31, H=2, K=K, V=V, beta=True, device=device)
    got, _, exact = passes(call, ends=False)
    size = (exact["dstate"] * call.initial_state.double()).norm(dim=(2, 3))
    assert ((got["dg"][:, 0].double() - exact["dg"][:, 0]).abs() / size).max() <= 3e-5


@pytest.mark.parametrize(("K", "V"), [(48, 80), (64, 64), (128, 64)])
def test_the_first_state_of_one_chunk_is_not_rounded_on_the_emulator(on_cpu, K, V):
    assert_first_state(K, V, "cpu")


@pytest.mark.gpu
def test_the_first_state_of_one_chunk_is_not_rounded():
    assert_first_state(48, 80, "cuda")
