"""Calls of one chunk by scalar decay's sweeps on Hopper, whose first state is not rounded where it is read."""

import pytest
import torch

from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from kernels.matrix.scalar_decay.hopper.test_backend import (
    H200,
    WIDTHS,
    example,
    launches_of,
    on_cpu,
    packed_example,
    passes,
    plans_of,
    three,
)

__all__ = ["on_cpu"]


@pytest.mark.slow
@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V", "packed"), [*((*each, False) for each in WIDTHS), (64, 64, True), (128, 128, True)])
def test_the_sweep_of_one_chunk_compiles_and_fits(K, V, packed, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded

    launches = recorded(monkeypatch, *launches_of())
    call = example(B=1, T=31, K=K, V=V)
    offsets = torch.tensor([0, 31], dtype=torch.int32) if packed else None
    Hopper().backward(plans_of(call, packed)[1][0].plan, call, offsets, torch.randn_like(call.v), None)
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


def assert_first_states_of_packed_sequences(device):
    call, offsets, (grad_o, _) = packed_example((0, 20, 20, 31), H=2, K=64, V=64, beta=True, device=device)
    got, _, exact = three(call, [best.plan for best, *_ in plans_of(call, packed=True)], (grad_o, None), offsets)
    size = (exact["dstate"] * call.initial_state.double()).norm(dim=(2, 3))[[0, 2]]
    assert ((got["dg"][0, [0, 20]].double() - exact["dg"][0, [0, 20]]).abs() / size).max() <= 3e-5


def test_the_first_states_of_packed_sequences_of_one_chunk_on_the_emulator(on_cpu):
    assert_first_states_of_packed_sequences("cpu")


@pytest.mark.gpu
def test_the_first_states_of_packed_sequences_of_one_chunk():
    assert_first_states_of_packed_sequences("cuda")


@pytest.mark.gpu
def test_the_first_state_of_one_chunk_is_not_rounded():
    assert_first_state(48, 80, "cuda")
