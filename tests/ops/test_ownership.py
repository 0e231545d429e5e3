"""What an op returns is memory of its own: whoever writes to it changes no argument, and the other way round."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import holdfast
from every_call import CALLS, FUSED, PARTS, SIZES
from fused_on_cpu import fused_on_cpu
from holdfast.nn import LSTM
from parity import leaves
from test_inductor import MIXERS

every_call = pytest.mark.parametrize("name", CALLS)
lengths = pytest.mark.parametrize("length", [0, 1, 5])


def memories(tree):
    return [x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def check(name, length, dtype=torch.float32, device="cpu"):
    call = (CALLS | PARTS)[name]
    for gradients in (False, True):
        arguments = call.arguments(dtype, sizes=replace(SIZES, T=length), device=device)
        given = [x.requires_grad_(gradients) for x in leaves(arguments)]
        before = [x.detach().clone() for x in given]
        made = call(arguments)
        owned = memories(made)
        assert not {*owned} & {*memories(arguments)}
        # C and n of an mLSTM's state are one memory; nothing else is
        assert len({*owned}) >= len(owned) - (name.startswith("mlstm") and len(owned) > 1)
        if gradients:
            outputs = leaves(made)
            cotangents = [torch.ones_like(x) for x in outputs]
            grads = torch.autograd.grad(outputs, given, cotangents, allow_unused=True)
            assert not {*memories(grads)} & {*memories(arguments), *owned}
        for x in leaves(made):
            x.detach().fill_(7)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@lengths
@every_call
def test_outputs_are_new_memory(name, length):
    check(name, length)


@lengths
@pytest.mark.parametrize("name", FUSED)
def test_with_inputs_prepared_by_a_kernel(name, length):
    with fused_on_cpu():
        check(name, length)


@pytest.mark.gpu
@lengths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_call
def test_on_a_gpu(name, length, dtype):
    # recorded and replayed on the way
    for _ in range(4):
        check(name, length, dtype, "cuda")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.has_state])
def test_packed_sequences_of_no_tokens(name):
    """Their final states are the initial ones, in memory of their own."""
    call = (CALLS | PARTS)[name]
    arguments = call.arguments(sizes=replace(SIZES, B=1, T=0))
    cu_seqlens = torch.tensor([0, 0])
    _, state = call(arguments, cu_seqlens=cu_seqlens)
    assert not {*memories(state)} & {*memories(arguments)}
    for x, y in zip(leaves(state), leaves(arguments["initial_state"]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_mixers_return_states_of_their_own(name, length):
    mixer = MIXERS[name]()
    _, state = mixer(torch.randn(2, 3, 8))
    state = tree_map(torch.detach, state)
    y, after = mixer(torch.randn(2, length, 8), state)
    assert not {*memories((y, after))} & {*memories(state)}


def test_layers_return_states_of_their_own():
    layer = LSTM(8, 8, num_layers=2)
    _, state = layer(torch.randn(3, 2, 8))
    made = layer(torch.randn(1, 2, 8), tree_map(torch.detach, state))
    assert not {*memories(made)} & {*memories(state)}


def test_a_step_returns_an_output_of_its_own():
    for name in ("simple_gla", "mlstm", "gated_delta_rule"):
        arguments = CALLS[name].arguments(torch.float32, sizes=replace(SIZES, T=1))
        state = arguments.pop("initial_state")
        o = holdfast.step(name, arguments, state)
        assert not {*memories(o)} & {*memories((arguments, state))}
