"""A patched model of transformers gives what it gives by itself: logits, gradients, prefill and decoding."""

import copy

import pytest
import torch

from holdfast.nn import patch, unpatch
from parity import relative_error
from patched_models import MODELS, Exact, bfloat16_ratios, decode, pair, run, tokens

# of three kinds of layer; the others' tests are slow
ONE_OF_EACH = ("qwen3_next", "mamba2", "recurrent_gemma")
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)
every_model = pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
with_a_cache = pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(relative_error(got[key], expected[key]) for key in expected)


def cached(model, ids, first, switch=lambda: None):
    """Logits of a prefill of `first` tokens, then token by token through the model's cache, and the cache."""
    key = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    with torch.no_grad():
        outputs = [model(ids[:, :first], use_cache=True)]
        cache = outputs[0][key]
        switch()
        outputs += [model(ids[:, t : t + 1], use_cache=True, **{key: cache}) for t in range(first, ids.shape[1])]
    return torch.cat([output.logits for output in outputs], 1), cache


@every_model
def test_logits_and_every_gradient_equal_the_models_own(name):
    own, patched = pair(MODELS[name], dtype=torch.float64)
    ids = tokens()
    exact = run(own, ids, exact=True)
    assert worst(run(patched, ids, exact=True), exact) <= 1e-10
    assert worst(run(patched, ids), exact) <= 1e-5
    assert worst(run(patched.float(), ids), exact) <= 2e-5
    # the model's own float32 gradient of a decay that hardly matters errs by more than that
    assert relative_error(run(patched.float(), ids)["logits"], run(own.float(), ids)["logits"]) <= 5e-6


@every_model
def test_greedy_tokens_and_their_logits_equal_the_models_own(name):
    own, patched = pair(MODELS[name])
    prompt = tokens(length=9)
    expected, logits = decode(own, prompt)
    got, patched_logits = decode(patched, prompt)
    assert torch.equal(got, expected)
    assert relative_error(patched_logits, logits) <= 5e-6
    own, patched = own.double(), patched.double()
    with Exact():
        expected, logits = decode(own, prompt, new=12)
        got, patched_logits = decode(patched, prompt, new=12)
    assert torch.equal(got, expected)
    assert relative_error(patched_logits, logits) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_OF_EACH, "kimi_linear", "mamba"])
def test_bfloat16_errs_at_most_twice_as_much_as_the_models_own(name):
    ratios = bfloat16_ratios(MODELS[name], draws=6, length=70, device="cpu")
    assert max(ratios.values()) <= 2, ratios


@with_a_cache
def test_bfloat16_decoding_errs_at_most_twice_as_much_as_the_models_own(name):
    own, patched = pair(MODELS[name], dtype=torch.bfloat16)
    ids = tokens(length=40)
    with Exact():
        exact, _ = cached(copy.deepcopy(own).double(), ids, 20)
    errors = [relative_error(cached(model, ids, 20)[0], exact) for model in (patched, own)]
    assert errors[0] <= 2 * errors[1]


@with_a_cache
def test_decoding_keeps_the_cache_in_place_in_holdfasts_layout(name):
    _, patched = pair(MODELS[name])
    ids = tokens(length=12)
    whole = patched(ids).logits
    got, cache = cached(patched, ids, 8)
    assert relative_error(got, whole) <= 5e-6
    state = cache.layers[0].recurrent_states[0]
    assert state.dtype == torch.float32
    assert (state.mT if name == "mamba2" else state).is_contiguous()


@with_a_cache
def test_a_cache_passes_between_the_patched_and_the_unpatched_model(name):
    own, model = pair(MODELS[name])
    ids = tokens(length=20)
    whole = own(ids).logits
    there, _ = cached(model, ids, 12, switch=lambda: unpatch(model))
    back, _ = cached(model, ids, 12, switch=lambda: patch(model))
    assert relative_error(there, whole) <= 5e-6
    assert relative_error(back, whole) <= 5e-6


@one_of_each
def test_padding_is_treated_as_the_model_treats_it(name):
    own, patched = pair(MODELS[name])
    ids, mask = tokens(length=30), torch.ones(2, 30, dtype=torch.long)
    ids[0, :7], mask[0, :7] = 0, 0
    expected, got = own(ids, attention_mask=mask).logits, patched(ids, attention_mask=mask).logits
    assert relative_error(got, expected) <= 5e-6
    assert relative_error(own(ids).logits[0], expected[0]) > 0.01
    assert torch.equal(*(decode(model, ids, 8, attention_mask=mask)[0] for model in (own, patched)))


@with_a_cache
def test_beams_reorder_the_states(name):
    own, patched = pair(MODELS[name])
    prompt = tokens(length=9)
    sequences = [decode(model, prompt, 8, num_beams=3)[0] for model in (own, patched)]
    assert torch.equal(*sequences)


@one_of_each
def test_gradient_checkpointing(name):
    own, patched = (model.train() for model in pair(MODELS[name]))
    ids = tokens()
    expected = run(patched, ids)
    for model in (own, patched):
        model.gradient_checkpointing_enable()
    assert worst(run(patched, ids), expected) <= 2e-6
    assert relative_error(run(own, ids)["logits"], expected["logits"]) <= 5e-6


@one_of_each
def test_autocast(name):
    own, patched = pair(MODELS[name])
    ids = tokens()
    exact = run(copy.deepcopy(own).double(), ids, exact=True)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        errors = [relative_error(run(model, ids)["logits"], exact) for model in (patched, own)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.slow
@with_a_cache
def test_torch_compile(name):
    two = {"num_hidden_layers": 2} | (
        {} if name == "mamba2" else {"layer_types": ["linear_attention", "full_attention"]}
    )
    patched = MODELS[name].having(**two).make()
    patch(patched)
    ids = tokens(length=20)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    gradients = {key: p.grad for key, p in patched.named_parameters() if p.grad is not None}
    patched.zero_grad()
    expected = run(patched, ids, use_cache=False)
    del expected["logits"]
    assert worst(gradients, expected) <= 1e-5
    whole = patched(ids).logits
    assert relative_error(cached(compiled, ids[:, :12], 9)[0], whole[:, :12]) <= 5e-6
