"""Patched models on a GPU, at head sizes that its kernels take: logits, gradients, prefill and decoding."""

import copy

import pytest
import torch

from holdfast.nn import patch, unpatch
from parity import relative_error
from patched_models import MODELS, Exact, bfloat16_ratios, decode, pair, run, tokens

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 128}
SIZES = {
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 64, "chunk_size": 64},
    "recurrent_gemma": {"lru_width": 256},
}
one_of_each = pytest.mark.parametrize("name", SIZES)


def sized(name):
    # decays that last, so that their gradients are more than the rounding of larger terms
    return MODELS[name].having(rates=(-3.0, 0.0), **WIDE | SIZES[name])


@one_of_each
def test_float32_equals_the_models_own(name):
    own, patched = pair(sized(name), device="cuda")
    ids = tokens(length=130).cuda()
    exact = run(copy.deepcopy(own).double(), ids, exact=True)
    theirs, mine = run(own, ids), run(patched, ids)
    errors = {
        key: (relative_error(mine[key], right), relative_error(theirs[key], right)) for key, right in exact.items()
    }
    assert all(error <= max(2 * by_itself, 2e-5) for error, by_itself in errors.values()), errors


@one_of_each
def test_bfloat16_errs_at_most_twice_as_much_as_the_models_own(name):
    ratios = bfloat16_ratios(sized(name), draws=6, length=130, device="cuda")
    assert max(ratios.values()) <= 2, ratios


@one_of_each
def test_greedy_tokens_and_their_logits_equal_the_models_own(name):
    own, patched = pair(sized(name), device="cuda")
    prompt = tokens(length=70).cuda()
    expected, logits = decode(own, prompt)
    got, patched_logits = decode(patched, prompt)
    assert torch.equal(got, expected)
    assert relative_error(patched_logits, logits) <= 2e-5


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_bfloat16_decoding_errs_at_most_twice_as_much_as_the_models_own(name):
    own, patched = pair(sized(name), dtype=torch.bfloat16, device="cuda")
    prompt = tokens(length=70).cuda()
    made, _ = decode(own, prompt, new=16)
    key = "cache_params" if name == "mamba2" else "past_key_values"

    def step_by_step(model):
        with torch.no_grad():
            outputs = [model(prompt, use_cache=True)]
            cache = {key: outputs[0][key]}
            outputs += [model(made[:, t : t + 1], use_cache=True, **cache) for t in range(70, 86)]
        return torch.cat([output.logits for output in outputs], 1)

    with Exact():
        exact = step_by_step(copy.deepcopy(own).double())
    assert relative_error(step_by_step(patched), exact) <= 2 * relative_error(step_by_step(own), exact)


@one_of_each
def test_a_backend_can_be_forced(name):
    _, patched = pair(sized(name), device="cuda")
    ids = tokens(length=70).cuda()
    expected = patched(ids).logits
    patch(patched, "chunked")
    assert relative_error(patched(ids).logits, expected) <= 2e-5
    assert unpatch(patched) == MODELS[name].layers
