"""The scan of the diagonal family's PyTorch backend against the plain loop, and its recomputation."""

import pytest
import torch

from holdfast.kernels.diagonal.torch.chunked import Chunked, _Run
from holdfast.kernels.lib.torch.linear_scan import chunk_size, scan
from holdfast.planner import Device, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes


def loop(a, x, state, reverse):
    steps = range(x.shape[1])
    out = torch.empty_like(x)
    for t in reversed(steps) if reverse else steps:
        out[:, t] = state = a[:, t] * state + x[:, t]
    return out, state


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 31])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 64])
def test_any_chunk_size_gives_the_loop(reverse, dtype, length, chunk):
    a, x = torch.randn(2, length, 3, dtype=dtype), torch.randn(2, length, 3, dtype=dtype)
    state = torch.randn(2, 3, dtype=dtype)
    expected, last = loop(a, x, state, reverse)
    out = torch.empty_like(x)
    torch.testing.assert_close(scan(a, x, state, out, chunk, reverse), last, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
def test_in_place_is_the_same(reverse):
    a, x, state = torch.randn(2, 50, 3).clamp(-1, 1), torch.randn(2, 50, 3), torch.randn(2, 3)
    out = torch.empty_like(x)
    scan(a, x, state, out, 7, reverse)
    scan(a, x, state, x, 7, reverse)
    assert torch.equal(out, x)


def test_a_narrow_output_is_the_wide_one_rounded():
    a, x, state = torch.rand(2, 50, 3), torch.randn(2, 50, 3, dtype=torch.bfloat16), torch.randn(2, 3)
    narrow, wide = torch.empty_like(x), torch.empty(2, 50, 3)
    assert torch.equal(scan(a, x, state, narrow, 7), scan(a, x, state, wide, 7))
    assert torch.equal(narrow, wide.bfloat16())


def test_neither_loop_is_long():
    for length in (0, 1, 2, 100, 4096, 100_000):
        chunk = chunk_size(length)
        assert 1 <= chunk <= max(1, length) ** 0.5
        assert length // chunk <= 2 * max(1, length) ** 0.5 + 1


@pytest.mark.parametrize("name", ["rglru", "rotlru", "hgrn"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 9, 150, 1000])
def test_the_states_of_the_backward_pass_are_bit_for_bit_those_of_the_forward_pass(name, packed, length):
    narrow = RECURRENCES[name].example(Draw(0, torch.bfloat16), Sizes(B=1 if packed else 2, T=length))
    cu_seqlens = None
    if packed:
        cu_seqlens = torch.tensor([0, length // 3, length // 3, length])
        narrow["initial_state"] = Draw(3).state(3, 16)
    call, _ = RECURRENCES[name].map(**narrow)
    backend, device = Chunked(), Device.named("cpu")
    plans = [
        backend.candidates(
            Problem(name, "diagonal", "bfloat16", (("B", 2), ("T", length), ("D", 16)), traits), device, direction
        )[0].plan
        for traits, direction in ((frozenset(), "forward"), (frozenset({"needs_grad"}), "backward"))
    ]
    forward, final = backend.forward(plans[0], call, cu_seqlens)
    # what backward runs when it is not given the states
    again = _Run(call, cu_seqlens, plans[1]["chunk"])
    states = torch.empty(call.x.shape)
    assert torch.equal(again.forward(states), final)
    assert torch.equal(states.bfloat16(), forward)
    wide, wide_final = backend.forward(plans[0], call._replace(x=call.x.float()), cu_seqlens)
    assert torch.equal(states, wide)
    assert torch.equal(final, wide_final)
    grads = backend.backward(plans[1], call, cu_seqlens, None, forward, final)
    given = backend.backward(plans[1], call, cu_seqlens, wide, forward, final)
    assert all(torch.equal(x, y) for x, y in zip(grads, given, strict=True) if x is not None)
