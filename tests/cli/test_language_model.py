"""The model, its optimizer and its sample."""

import pytest
import torch

from holdfast.cli.bench.models.mixers import MIXERS as MIXERS_OF_THE_BENCH
from holdfast.cli.bench.models.model import Model
from holdfast.cli.bench.models.scale import SMALL
from holdfast.cli.config import MIXERS
from holdfast.cli.errors import UserError
from holdfast.cli.generate import _pick, generate, printable
from holdfast.cli.language_model import LanguageModel, next_token_loss
from holdfast.cli.parity import ParityModel
from holdfast.cli.schedule import learning_rate, make_optimizer


@pytest.mark.parametrize("mixer", MIXERS)
def test_one_byte_at_a_time_equals_the_whole(mixer):
    model = LanguageModel(mixer, layers=2, width=32, heads=2).double()
    tokens = torch.randint(256, (2, 70))
    with torch.no_grad():
        whole, _ = model(tokens)
        logits, states = model(tokens[:, :60])
        pieces = [logits]
        for t in range(60, 70):
            logits, states = model(tokens[:, t : t + 1], states)
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_weight_learns(mixer):
    model = LanguageModel(mixer, layers=1, width=16, heads=2)
    windows = torch.randint(256, (2, 20))
    next_token_loss(model, windows[:, :-1], windows[:, 1:]).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.parametrize("mixer", ["gla", "attention"])
def test_the_likeliest_bytes_are_those_of_the_whole_forward(mixer):
    model = LanguageModel(mixer, layers=2, width=32, heads=2)
    made = generate(model, b"def ", 20, temperature=0)
    with torch.no_grad():
        logits, _ = model(torch.tensor([[*b"def ", *made]]))
    assert logits[0, 3:-1].argmax(-1).tolist() == made


def test_a_sample_repeats_with_its_seed_and_leaves_the_global_one_alone():
    model = LanguageModel("gla", layers=1, width=16, heads=2)
    before = torch.get_rng_state()
    first = generate(model, b"a", 30, seed=5)
    assert generate(model, b"a", 30, seed=5) == first
    assert generate(model, b"a", 30, seed=6) != first
    assert torch.get_rng_state().equal(before)


def test_a_high_temperature_levels_the_choice_and_a_low_one_takes_the_likeliest():
    logits, draw = torch.tensor([0.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    found = {temperature: {_pick(logits, temperature, draw) for _ in range(60)} for temperature in (0.0, 0.01, 100.0)}
    assert found == {0.0: {1}, 0.01: {1}, 100.0: {0, 1, 2}}


def test_norms_divide_by_no_less_than_a_thousandth():
    """Square root of 1e-6."""
    models = LanguageModel("gla", 1, 16, 2), ParityModel("gla", 1, 16, 2), Model(MIXERS_OF_THE_BENCH[0], SMALL)
    norms = [[x.eps for x in model.modules() if isinstance(x, torch.nn.RMSNorm)] for model in models]
    assert norms == [[1e-6] * len(found) for found in norms]
    assert min(map(len, norms)) == 3


def test_a_head_of_its_own_has_other_weights():
    tied, free = (LanguageModel("gla", 1, 16, 2, 40, tie) for tie in (True, False))
    assert free.head.weight.shape == free.embedding.weight.shape == (40, 16)
    assert {name for name, _ in free.named_parameters()} - {name for name, _ in tied.named_parameters()} == {
        "head.weight"
    }
    assert LanguageModel("gla", 1, 64, 2, 256, False).head.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    tokens = torch.randint(40, (1, 5))
    with torch.no_grad():
        before, _ = free(tokens)
        _, states = free(tokens[:, :4])
        free.head.weight[7] = 0
        after, _ = free(tokens)
        assert not after[..., 7].any()
        assert torch.equal(after[..., :7], before[..., :7])
        # a step reads the same head
        assert not free.step(tokens[:, 4:], states)[..., 7].any()


def test_rows_beyond_the_vocabulary_are_not_sampled():
    model = LanguageModel("gla", 1, 16, 2, 64, False)
    assert max(generate(model, [1], 60, temperature=9.0)) >= 8
    assert max(generate(model, [1], 60, temperature=9.0, vocabulary=8)) < 8


def test_a_sample_cannot_steer_the_terminal():
    assert printable(b"a\x1b[2J\tb\r\n\xff\x00") == "a\ufffd[2J b\ufffd\n\ufffd\ufffd"


def test_sizes_that_a_mixer_refuses_are_options():
    with pytest.raises(UserError, match="--mixer lstm --width 10 --heads 4: "):
        LanguageModel("lstm", layers=1, width=10, heads=4)


def test_only_matrices_decay():
    model = LanguageModel("gla", layers=1, width=16, heads=2)
    decayed, free = make_optimizer(model, 1e-3).param_groups
    assert {p.ndim for p in free["params"]} == {1}
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert (decayed["weight_decay"] > 0, free["weight_decay"]) == (True, 0)
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 1.0, 10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
