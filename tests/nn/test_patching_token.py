"""Patched layers of transformers take a token of decoding by one op where their code is known, else their own way."""

import copy

import pytest
import torch
from torch import nn

from holdfast.nn import patch, unpatch
from holdfast.nn.patching import token
from parity import relative_error
from patched_models import MODELS, VOCABULARY

# RecurrentGemma's recurrence is no layer, Falcon-H1 multiplies what it projects, the op has neither KDA nor Mamba-1
BY_ITSELF = ("falcon_h1", "recurrent_gemma", "kimi_linear", "mamba", "falcon_mamba", "jamba")
BY_TOKEN = [name for name in MODELS if name not in BY_ITSELF]
LAYERS = {name: MODELS[name].layers for name in MODELS}


@pytest.fixture
def steps(monkeypatch):
    """The calls of the op, counted."""
    made = []
    op = token.conv_step
    monkeypatch.setattr(token, "conv_step", lambda *arguments: made.append(1) or op(*arguments))
    return made


def decoded(model, ids, prompt):
    """Logits of a prompt and of the tokens that follow one by one, and the cache."""
    with torch.no_grad():
        output = model(ids[:, :prompt], use_cache=True)
        key = next(key for key in ("past_key_values", "cache_params") if output.get(key) is not None)
        parts = [output.logits]
        for part in ids[:, prompt:].split(1, 1):
            output = model(part, use_cache=True, **{key: output[key]})
            parts.append(output.logits)
    return torch.cat(parts, 1), key, output[key]


@pytest.mark.parametrize("name", [*BY_TOKEN, "falcon_h1"])
def test_tokens_equal_the_models_own(name, steps):
    model, ids = MODELS[name].make(), torch.randint(VOCABULARY, (2, 12))
    right, _, _ = decoded(model, ids, 7)
    patch(model)
    got, _, _ = decoded(model, ids, 7)
    assert relative_error(got, right) <= 2e-6
    assert len(steps) == (5 * LAYERS[name] if name in BY_TOKEN else 0)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_the_model_may_be_unpatched_and_patched_between_tokens(name):
    model, ids = MODELS[name].make(), torch.randint(VOCABULARY, (2, 14))
    right, _, _ = decoded(model, ids, 7)
    patch(model)
    got, key, cache = decoded(model, ids[:, :9], 7)
    parts = [got]
    with torch.no_grad():
        for n, part in enumerate(ids[:, 9:].split(1, 1)):
            (unpatch if n % 2 else patch)(model)
            parts.append(model(part, use_cache=True, **{key: cache}).logits)
    assert relative_error(torch.cat(parts, 1), right) <= 2e-6


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_what_a_step_would_pass_over_goes_the_layers_own_way(name, steps):
    ids = torch.randint(VOCABULARY, (2, 9))

    def count(change, **options):
        model = copy.deepcopy(own)
        patch(model, **options)
        layers = [layer for layer in model.modules() if "_patched_by_holdfast" in vars(layer)]
        change(layers)
        steps.clear()
        decoded(model, ids, 7)
        return len(steps), len(layers)

    own = MODELS[name].make()
    made, layers = count(lambda layers: None)
    assert made == 2 * layers
    assert count(lambda layers: None, backend="reference") == (0, layers)
    # a hook on a part that the op stands for
    seen = []
    assert count(lambda layers: layers[0].norm.register_forward_hook(lambda *_: seen.append(1)))[0] == 2 * (layers - 1)
    assert len(seen) == 3
    with torch.enable_grad():
        patch(own)
        output = own(ids[:, :7], use_cache=True)
        key = next(key for key in ("past_key_values", "cache_params") if output.get(key) is not None)
        steps.clear()
        assert own(ids[:, 7:8], use_cache=True, **{key: output[key]}).logits.requires_grad
    assert steps == []


def test_a_layer_with_another_code_is_not_known():
    layer = next(x for x in MODELS["mamba2"].make().modules() if type(x).__name__ == "Mamba2Mixer")
    assert token.reader_of(layer) is token.mamba2

    class Scaled(type(layer)):
        def forward(self, hidden_states, cache_params=None, attention_mask=None):
            return self.multiplier * hidden_states

    layer.__class__ = Scaled
    assert token.reader_of(layer) is None
    assert token.reader_of(nn.Linear(2, 2)) is None
    layer.__class__ = Scaled.__mro__[1]
    layer.activation = "gelu"
    assert token.reader_of(layer) is None
