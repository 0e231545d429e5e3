"""The sLSTM mixer: one set of weights for training, prefill and decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.nn import SLSTM
from parity import assert_close


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return SLSTM(24, 3).to(dtype)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_prefill_and_decode_equal_the_whole(dtype, limit):
    mixer, x = make(dtype), torch.randn(2, 40, 24, dtype=dtype)
    whole, final = mixer(x)
    y, state = mixer(x[:, :20])
    outputs = [y]
    for t in range(20, 40):
        y, state = mixer(x[:, t : t + 1], state)
        outputs.append(y)
    assert_close([torch.cat(outputs, 1), *state], [whole, *final], limit)


@settings(max_examples=10)
@given(first=st.integers(0, 20), second=st.integers(0, 20))
def test_a_sequence_may_be_split_anywhere(first, second):
    mixer, x = make(), torch.randn(2, first + second + 1, 24, dtype=torch.float64)
    whole, final = mixer(x)
    outputs, state = [], None
    for part in x.split([first, second, 1], 1):
        y, state = mixer(part, state)
        outputs.append(y)
    assert_close([torch.cat(outputs, 1), *state], [whole, *final], 1e-9)


@pytest.mark.parametrize("lengths", [(5, 20, 1, 2), (0, 5, 0, 2), (0, 0, 0, 0)])
def test_packed_sequences_equal_separate_calls(lengths):
    mixer, x = make(), torch.randn(1, sum(lengths), 24, dtype=torch.float64)
    _, entry = mixer(torch.randn(4, 3, 24, dtype=torch.float64))
    y, state = mixer(x, entry, cu_seqlens=torch.tensor((0, *lengths)).cumsum(0).int())
    alone = [mixer(part, tuple(s[n : n + 1] for s in entry)) for n, part in enumerate(x.split(lengths, 1))]
    states = [torch.cat(parts) for parts in zip(*(state for _, state in alone), strict=True)]
    assert_close([y, *state], [torch.cat([part for part, _ in alone], 1), *states], 1e-9)


def test_every_parameter_and_the_state_get_gradients():
    mixer, x = make(), torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    _, entry = mixer(torch.randn(2, 3, 24, dtype=torch.float64))
    entry = tuple(s.detach().requires_grad_() for s in entry)
    y, _ = mixer(x, entry)
    y.square().sum().backward()
    for name, p in [*mixer.named_parameters(), ("x", x), ("h", entry[0]), ("c", entry[1]), ("n", entry[2])]:
        assert p.grad is not None, name
        assert p.grad.abs().max() > 1e-8, name


def test_memory_starts_long():
    mixer = make()
    assert mixer.b[1].min() >= 3
    assert not mixer.b[0].any()


def test_it_learns_to_recall_the_first_token():
    torch.manual_seed(0)
    mixer, embed, head = SLSTM(16, 2), torch.nn.Embedding(4, 16), torch.nn.Linear(16, 4)
    tokens = torch.randint(0, 4, (64, 10))
    optimizer = torch.optim.Adam([*mixer.parameters(), *embed.parameters(), *head.parameters()], lr=0.01)
    losses = []
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(head(mixer(embed(tokens))[0][:, -1]), tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.2
    assert losses[-1] < 0.3


def test_half_precision_and_autocast():
    mixer, x = make(torch.float32), torch.randn(2, 12, 24)
    exact, _ = make(torch.float64)(x.double())
    y, state = make(torch.bfloat16)(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert {s.dtype for s in state} == {torch.float32}
    assert_close([y.double()], [exact], 0.03)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        z, _ = mixer(x, state)
    assert {s.dtype for s in state} == {torch.float32}
    assert_close([y.double()], [exact], 0.03)
    assert z.isfinite().all()


def test_compiles_into_one_graph():
    torch.compiler.reset()
    mixer, x = make(torch.float32), torch.randn(2, 6, 24)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    whole, state = mixer(x)
    y, got = compiled(x)
    assert_close([y, *got], [whole, *state], 1e-5)
    assert_close([compiled(x[:, :1], got)[0]], [mixer(x[:, :1], state)[0]], 1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d_model": 0}, ["d_model", "positive", "0"]),
        ({"d_model": 10, "num_heads": 3}, ["num_heads", "10", "3"]),
        ({"d_model": 10, "num_heads": 0}, ["num_heads", "positive", "0"]),
    ],
)
def test_sizes_are_checked(options, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        SLSTM(**options)
    assert all(word in str(caught.value) for word in words)


def test_states_are_checked():
    mixer, x = make(torch.float32), torch.randn(2, 6, 24)
    _, state = mixer(x)
    with pytest.raises(ValueError, match=r"state\[1\]: expected c of shape \[2, 3, 8\]; got \[1, 3, 8\]"):
        mixer(x, (state[0], state[1][:1], *state[2:]))
    with pytest.raises(ValueError, match="state: expected 4 tensors"):
        mixer(x, state[:3])
