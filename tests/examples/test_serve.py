"""examples/serve: whatever is beside a sequence, guessed or remembered, it gets the tokens that it gets alone."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "serve"


@pytest.fixture
def serve(monkeypatch):
    """The example's modules, by name."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("model", "slots", "engine")
    found = {}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in names:
        found[name] = importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("serve_main", FOLDER / "__main__.py")
    found["main"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found["main"])
    yield found
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def model(serve):
    torch.manual_seed(0)
    return serve["model"].Model(vocabulary=23, width=32, head_dim=16)


def alone(serve, model, prompt, most, ends=None):
    """What reading the whole sequence again for every token gives."""
    tokens = list(prompt)
    layers = serve["slots"].Pool(model, 1).layers
    for _ in range(most):
        places = serve["model"].Places(first=-1, last=-1, block=len(tokens) + 1, blocks=[])
        tokens.append(int(model.prefill(tokens, layers, places).argmax()))
        if tokens[-1] == ends:
            break
    return tokens[len(prompt) :]


def prompts():
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(23, (12,), generator=draw).tolist()
    own = [torch.randint(23, (n,), generator=draw).tolist() for n in (1, 5, 9, 2, 3, 17)]
    return [*own, shared + own[1], shared + own[3], shared[:8], shared]


@pytest.mark.parametrize("guesses", [0, 3, 7])
def test_a_sequence_gets_what_it_gets_alone(serve, model, guesses):
    engine = serve["engine"].Engine(model, rows=3, guesses=guesses, block=4, slots=40)
    requests = [serve["engine"].Request(prompt, most) for prompt, most in zip(prompts(), range(3, 13), strict=True)]
    for request in requests[:5]:
        engine.add(request)
    engine.turn()
    for request in requests[5:]:
        engine.add(request)
    while not engine.is_idle():
        engine.turn()
    for request in requests:
        assert request.done.is_set()
        assert request.output == alone(serve, model, request.prompt, request.most)
    # three prompts begin with two or three blocks of another
    assert engine.cache.found >= 8 + 8 + 8 - 4
    assert len(engine.pool.free) + len(engine.cache.held) == 40


def test_guesses_save_turns(serve, model):
    """A sequence that goes round in a circle is guessed right."""
    turns = {}
    for guesses in (0, 3):
        engine = serve["engine"].Engine(model, rows=1, guesses=guesses)
        request = engine.add(serve["engine"].Request([1, 2], 30))
        while not engine.is_idle():
            engine.turn()
        turns[guesses] = engine.turns
    assert request.output == alone(serve, model, [1, 2], 30)
    assert turns[0] == 29
    assert turns[3] < 29


def test_a_sequence_ends_with_its_last_token(serve, model):
    whole = alone(serve, model, [4, 5, 6], 10)
    engine = serve["engine"].Engine(model, rows=2)
    request = engine.add(serve["engine"].Request([4, 5, 6], 10, ends=whole[3]))
    while not engine.is_idle():
        engine.turn()
    assert request.output == alone(serve, model, [4, 5, 6], 10, whole[3])
    assert len(request.output) <= 4


def test_slots_run_short(serve, model):
    """States of prefixes are given up where sequences need their slots."""
    engine = serve["engine"].Engine(model, rows=2, guesses=1, block=2, slots=6)
    requests = [engine.add(serve["engine"].Request(prompt, 4)) for prompt in prompts()]
    while not engine.is_idle():
        engine.turn()
    assert all(r.output == alone(serve, model, r.prompt, 4) for r in requests)
    with pytest.raises(ValueError, match=r"slots: expected 6 or more for 2 rows; got 5"):
        serve["engine"].Engine(model, rows=2, guesses=1, slots=5)
    with pytest.raises(ValueError, match=r"prompt: expected one token or more"):
        engine.add(serve["engine"].Request([], 4))


@pytest.mark.parametrize(
    ("tokens", "guessed"),
    [([1, 2, 3, 1, 2], [3, 1, 2]), ([1, 2, 3], [3, 3, 3]), ([7], [7, 7, 7]), ([5, 5, 5], [5, 5, 5])],
)
def test_guesses(serve, tokens, guessed):
    assert serve["engine"].guess(tokens, 3) == guessed


def test_over_http(serve):
    pytest.importorskip("starlette", reason="needs starlette, which pip install 'holdfast[dev]' brings")
    pytest.importorskip("transformers", reason="needs transformers, which pip install 'holdfast[dev]' brings")
    from starlette.testclient import TestClient
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    model = serve["model"].Model(len(tokenizer))
    client = TestClient(serve["main"].app(serve["main"].Worker(serve["engine"].Engine(model)), tokenizer))
    said = client.post("/generate", json={"text": "once upon", "tokens": 5})
    assert said.status_code == 200
    prompt = tokenizer.encode("once upon", add_special_tokens=False)
    right = alone(serve, model, prompt, 5, tokenizer.eos_token_id)
    assert said.json() == {"text": tokenizer.decode(right), "tokens": len(right)}
    for wrong in ({}, {"text": ""}, {"text": "a", "tokens": 0}):
        assert client.post("/generate", json=wrong).status_code == 400
