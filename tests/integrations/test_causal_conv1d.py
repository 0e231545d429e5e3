"""The causal-conv1d package's functions, held against its equation a token at a time."""

import sys
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations import causal_conv1d
from holdfast.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from holdfast.integrations.causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states

B, D, T, W = 2, 3, 7, 4


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def stepped(x, weight, bias, activation=None, before=None, seq_idx=None):
    """y [B, D, T] in float64: each token's sum over the W tokens that end with it, of its own sequence alone."""
    batch, _, length = x.shape
    width = weight.shape[1]
    before = torch.zeros(batch, x.shape[1], width - 1) if before is None else before
    tokens = torch.cat([before, x], 2).double()
    numbers = torch.zeros(batch, length) if seq_idx is None else seq_idx
    numbers = F.pad(numbers, (width - 1, 0), value=-7 if seq_idx is not None else 0)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for b in range(batch):
        for t in range(length):
            if numbers[b, t + width - 1] < 0:
                continue
            total = 0 if bias is None else bias.double()
            for j in range(width):
                if numbers[b, t + j] == numbers[b, t + width - 1]:
                    total = total + weight[:, j].double() * tokens[b, :, t + j]
            y[b, :, t] = total if activation is None else F.silu(total)
    return y


def assert_close(found, right):
    torch.testing.assert_close(found.double(), right.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_whole_sequence(activation, has_bias):
    x, weight, bias = drawn(B, D, T), drawn(D, W), drawn(D) if has_bias else None
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    assert_close(y, stepped(x, weight, bias, activation))
    # channels side by side, as that package has it
    assert y.stride(1) == 1


@pytest.mark.parametrize("length", [0, 1, 2, T])
@pytest.mark.parametrize("given", [False, True])
def test_states_before_and_after(length, given):
    x, weight, before = drawn(B, D, length), drawn(D, W), drawn(B, D, W - 1) if given else None
    y, last = causal_conv1d_fn(x, weight, None, None, before, True)
    assert_close(y, stepped(x, weight, None, before=before))
    right = torch.cat([torch.zeros(B, D, W - 1) if before is None else before, x], 2)[..., length:]
    assert torch.equal(last, right)
    room = torch.full((B, D, W - 1), torch.nan)
    _, found = causal_conv1d_fn(x, weight, None, None, before, True, room)
    assert found is room
    assert torch.equal(room, right)


def test_states_have_the_inputs_dtype():
    x, weight = drawn(B, D, T, dtype=torch.bfloat16), drawn(D, W)
    y, last = causal_conv1d_fn(x, weight, initial_states=x[..., : W - 1], return_final_states=True)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(last, x[..., -3:])


def test_gradients_of_all_tensors():
    given = [drawn(B, D, T), drawn(D, W), drawn(D), drawn(B, D, W - 1)]
    leaves = [x.double().requires_grad_() for x in given]

    def run(x, weight, bias, before):
        return causal_conv1d_fn(x, weight, bias, None, before, True, activation="silu")

    assert torch.autograd.gradcheck(run, leaves)


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 5, -1], [3, 4, 4, 4, -1, 5, 5]], dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 2])
def test_numbered_sequences(rows):
    seq_idx = NUMBERS[:rows]
    x, weight, bias = drawn(rows, D, T).requires_grad_(), drawn(D, W).requires_grad_(), drawn(D)
    y = causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")
    right = stepped(x, weight, bias, "silu", seq_idx=seq_idx)
    assert_close(y, right)
    assert (y.mT[seq_idx < 0] == 0).all()
    grads = [torch.autograd.grad(each.double().sin().sum(), (x, weight)) for each in (y, right)]
    for found, expected in zip(*grads, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("numbers", [[0, 1, 0], [0, -1, 0], [2, 1, 1]])
def test_a_number_that_comes_again_is_refused(numbers):
    with pytest.raises(ValueError, match="seq_idx: expected numbers that rise"):
        causal_conv1d_fn(drawn(1, D, 3), drawn(D, W), seq_idx=torch.tensor([numbers]))


def test_what_is_not_served():
    x, weight, numbers = drawn(B, D, T), drawn(D, W), NUMBERS
    for wrong, message in (
        ({"seq_idx": numbers, "initial_states": drawn(B, D, W - 1)}, "initial_states: not served beside seq_idx"),
        ({"seq_idx": numbers, "return_final_states": True}, "return_final_states: not served beside seq_idx"),
        ({"seq_idx": numbers[:1]}, r"seq_idx: expected shape \[B=2, T=7\]"),
        ({"seq_idx": numbers.float()}, r"seq_idx: expected a tensor of torch.int32 or torch.int64; got torch.float32"),
        ({"final_states_out": drawn(B, D, W - 1)}, "final_states_out: expected return_final_states=True"),
        ({"initial_states": drawn(B, D, W)}, r"initial_states: expected shape \[B=2, D=3, W-1=3\]"),
        ({"activation": "gelu"}, "activation: expected 'silu', 'swish' or None; got 'gelu'"),
        ({"return_final_states": 1}, "return_final_states: expected a bool"),
        ({"activatoin": "silu"}, "activatoin"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            causal_conv1d_fn(x, weight, **wrong)


def pool(rows, size, side_by_side):
    state = drawn(rows, D, size)
    return state.mT.contiguous().mT if side_by_side else state


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("size", [W - 1, W, W + 5])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_update(length, size, side_by_side):
    x, weight, bias = drawn(B, D, length), drawn(D, W), drawn(D)
    state = pool(B, size, side_by_side)
    before, place = state.clone(), state.data_ptr()
    y = causal_conv1d_update(x, state, weight, bias, "silu")
    assert_close(y, stepped(x, weight, bias, "silu", before[..., size - W + 1 :]))
    assert torch.equal(state, torch.cat([before, x], 2)[..., length:])
    assert state.data_ptr() == place


@pytest.mark.parametrize("side_by_side", [False, True])
def test_update_of_one_token_without_its_axis(side_by_side):
    x, weight, state = drawn(B, D), drawn(D, W), pool(B, W - 1, side_by_side)
    right = stepped(x[..., None], weight, None, before=state.clone())[..., 0]
    y = causal_conv1d_update(x, state, weight)
    assert_close(y, right)
    assert torch.equal(state[..., -1], x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_update_of_a_ring(dtype):
    """Token after token, two at a time, against the whole sequence."""
    length, size = 14, 5
    x, weight = drawn(B, D, length), drawn(D, W)
    right = stepped(x, weight, None)
    # sequences that have had different numbers of tokens, whose first here is token 0
    seen, ring = torch.tensor([0, 3], dtype=dtype), torch.zeros(B, D, size)
    for t in range(0, length, 2):
        y = causal_conv1d_update(x[..., t : t + 2], ring, weight, cache_seqlens=seen + t)
        assert_close(y, right[..., t : t + 2])
    for b, first in enumerate((0, 3)):
        for t in range(length - size, length):
            assert torch.equal(ring[b, :, (first + t) % size], x[b, :, t])


def test_more_tokens_than_a_ring_holds():
    x, weight, ring = drawn(1, D, 7), drawn(D, 3), torch.zeros(1, D, 2)
    y = causal_conv1d_update(x, ring, weight, cache_seqlens=torch.tensor([0]))
    assert_close(y, stepped(x, weight, None))
    # token 6 is at place 0
    assert torch.equal(ring, x[..., [6, 5]])


@pytest.mark.parametrize("rows", [[3, 1, 0], [-1, 4, 0], [0, -1, -1], [-1, -1, -1], []])
@pytest.mark.parametrize("is_ring", [False, True])
def test_update_of_rows_of_a_pool(rows, is_ring):
    weight, state, before = drawn(D, W), drawn(5, D, W), None
    x, rows = drawn(len(rows), D, 2), torch.tensor(rows, dtype=torch.int32)
    before, seen = state.clone(), torch.arange(len(rows), dtype=torch.int32)
    y = causal_conv1d_update(x, state, weight, None, None, seen if is_ring else None, rows)
    for b, row in enumerate(rows.tolist()):
        if row < 0:
            assert (y[b] == 0).all()
            continue
        alone = before[row : row + 1].clone()
        lengths = seen[b : b + 1] if is_ring else None
        assert_close(y[b : b + 1], causal_conv1d_update(x[b : b + 1], alone, weight, cache_seqlens=lengths))
        assert torch.equal(state[row : row + 1], alone)
    others = [row for row in range(5) if row not in rows.tolist()]
    assert torch.equal(state[others], before[others])


def test_updates_that_are_not_served():
    x, state, weight = drawn(B, D), drawn(B, D, W), drawn(D, W)
    for wrong, message in (
        ({"conv_state": drawn(B, D, W - 2)}, "conv_state: expected 3 inputs at least, as W = 4; got 2"),
        ({"conv_state": drawn(B + 1, D, W)}, r"conv_state: expected shape \[B=2, D=3, S\]; got \[3, 3, 4\]"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, r"cache_seqlens: expected shape \[B=2\]; got \[3\]"),
        ({"cache_seqlens": 3}, "cache_seqlens: expected a tensor of torch.int32 or torch.int64; got int"),
        ({"conv_state_indices": torch.zeros(2)}, "conv_state_indices: expected a tensor of torch.int32"),
        ({"activation": True}, "activation: expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            causal_conv1d_update(**{"x": x, "conv_state": state, "weight": weight} | wrong)


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_states_of_packed_sequences(length, dtype):
    offsets = torch.tensor([0, 4, 4, 5, 11], dtype=dtype)
    x = drawn(11, D).requires_grad_()
    states = causal_conv1d_varlen_states(x, offsets, length)
    assert states.shape == (4, D, length)
    assert states.stride(1) == 1
    right = torch.stack([F.pad(x[a:b].mT, (length, 0))[:, -length:] for a, b in ((0, 4), (4, 4), (4, 5), (5, 11))])
    assert torch.equal(states, right)
    mask = torch.randn_like(right)
    grads = [torch.autograd.grad((mask * each).sum(), x)[0] for each in (states, right)]
    assert torch.equal(*grads)
    none = causal_conv1d_varlen_states(x[:0], torch.tensor([0, 0], dtype=dtype), length)
    assert torch.equal(none, torch.zeros(1, D, length))


def test_states_of_packed_sequences_go_on():
    """Where `causal_conv1d_update` takes them up."""
    x, weight, offsets = drawn(7, D), drawn(D, W), torch.tensor([0, 2, 6])
    states = causal_conv1d_varlen_states(x, offsets, W - 1)
    token = drawn(2, D)
    y = causal_conv1d_update(token, states, weight)
    for n, (a, b) in enumerate(((0, 2), (2, 6))):
        whole = torch.cat([x[a:b], token[n : n + 1]]).mT[None]
        assert_close(y[n], stepped(whole, weight, None)[0, :, -1])


def test_states_of_packed_sequences_that_are_not_served():
    x, offsets = drawn(7, D), torch.tensor([0, 7])
    for wrong, message in (
        ((x[None], offsets, 3), r"x: expected shape \[T, D\]; got \[1, 7, 3\]"),
        ((x, offsets.float(), 3), r"cu_seqlens: expected a tensor of torch\.int32 or torch\.int64; got torch\.float32"),
        ((x, offsets[None], 3), r"cu_seqlens: expected shape \[sequences \+ 1=1\]; got \[1, 2\]"),
        ((x, offsets, 0), "state_len: expected a positive int; got 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            causal_conv1d_varlen_states(*wrong)


def test_in_the_packages_place(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "causal_conv1d"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "causal_conv1d", causal_conv1d)
    package = import_module("causal_conv1d")
    assert (package.causal_conv1d_fn, package.causal_conv1d_update) == (causal_conv1d_fn, causal_conv1d_update)
    # as mamba_ssm imports them
    try:
        varlen = import_module("causal_conv1d.causal_conv1d_varlen")
        interface = import_module("causal_conv1d.causal_conv1d_interface")
        assert varlen.causal_conv1d_varlen_states(torch.ones(2, D), torch.tensor([0, 2]), 1).shape == (1, D, 1)
        assert interface.causal_conv1d_fn(torch.ones(1, D, 2), torch.ones(D, W)).shape == (1, D, 2)
    finally:
        for name in [name for name in sys.modules if name.startswith("causal_conv1d.")]:
            del sys.modules[name]
