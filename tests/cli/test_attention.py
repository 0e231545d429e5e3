"""Attention as a mixer: its equation by hand, and its decoding from keys and values that are kept."""

import pytest
import torch

from holdfast.cli.attention import Attention, with_room
from holdfast.cli.errors import UserError
from holdfast.cli.language_model import LanguageModel


@pytest.fixture
def layer():
    return Attention(16, 2).double().requires_grad_(False)


def drawn(tokens, batch=3):
    return torch.randn(batch, tokens, 16, dtype=torch.float64)


def turned(x):
    """x [B, T, H, 8]: pair (j, j + 4) as a complex number, turned by its position."""
    angle = torch.arange(x.shape[1])[:, None, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    pairs = torch.complex(*x.split(4, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def test_a_token_weighs_those_before_it_by_the_distance_too(layer):
    x = drawn(7)
    q, k, v = (part.view(3, 7, 2, 8) for part in (x @ layer.qkv_proj.weight.T).split(16, -1))
    scores = torch.einsum("bthd,bshd->bhts", turned(q), turned(k)) / 8**0.5
    shares = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", shares, v).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_state_is_continued_and_left_as_it_was(layer):
    x = drawn(9)
    whole, _ = layer(x)
    _, state = layer(x[:, :4])
    before = [part.clone() for part in state]
    y, after = layer(x[:, 4:7], state)
    z, _ = layer(x[:, 7:], after)
    torch.testing.assert_close(torch.cat([y, z], 1), whole[:, 4:])
    assert all(map(torch.equal, state, before))
    assert [part.shape[2] for part in after[:2]] == [7, 7]


def test_steps_take_the_free_places_and_then_none_is_left(layer):
    x = drawn(6)
    whole, _ = layer(x)
    state = with_room(layer(x[:, :0])[1], 6)
    places = [part.data_ptr() for part in state]
    steps = [layer.step(x[:, t : t + 1], state) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert [part.data_ptr() for part in state] == places
    with pytest.raises(ValueError, match="state: expected a free place, as with_room makes; all 6 are taken"):
        layer.step(x[:, :1], state)


def test_sequences_of_a_batch_may_have_taken_more_or_less(layer):
    x = drawn(5, 2)
    whole, state = layer(x)
    # the second sequence knows only two tokens; what its other places hold must not matter
    held = (*with_room(state, 1)[:2], torch.tensor([4, 2]))
    y = layer.step(torch.stack([x[0, 4:5], x[1, 2:3]]), held)
    torch.testing.assert_close(y[:, 0], torch.stack([whole[0, 4], whole[1, 2]]))
    assert held[2].tolist() == [5, 3]


def test_widths_that_do_not_fit_are_options():
    with pytest.raises(UserError, match="--mixer attention --width 18 --heads 4: expected channels that the heads"):
        LanguageModel("attention", layers=1, width=18, heads=4)
    with pytest.raises(UserError, match="expected an even number of channels a head, for the rotation; got 3"):
        LanguageModel("attention", layers=1, width=6, heads=2)
