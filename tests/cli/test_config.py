"""Settings: defaults, checks, and the way through a checkpoint."""

import pytest
import torch

from holdfast.cli.config import ATTENTION, FLASHRNN_165M, MIXERS, PRESETS, LanguageModelConfig
from holdfast.cli.errors import UserError
from holdfast.cli.language_model import LanguageModel, count_parameters
from holdfast.cli.train import _preset


def test_round_trip():
    config = LanguageModelConfig(mixer="mamba2", width=96, heads=3, glob=("*.md", "a/*.txt"), text="/a/b")
    assert LanguageModelConfig.from_dict(config.to_dict()) == config


def test_to_dict_holds_plain_values_only():
    plain = (str, int, float, bool, list, type(None))
    assert all(type(value) in plain for value in LanguageModelConfig(glob=("*.py",)).to_dict().values())


def test_from_dict_names_odd_settings():
    with pytest.raises(UserError, match="colour, width"):
        LanguageModelConfig.from_dict(
            {n: v for n, v in LanguageModelConfig().to_dict().items() if n != "width"} | {"colour": 1}
        )


def test_changed_ignores_what_is_not_given():
    assert LanguageModelConfig().changed({"width": 64, "steps": None}) == LanguageModelConfig(width=64)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_are_valid(preset):
    config = LanguageModelConfig().changed(preset)
    assert {name: getattr(config, name) for name in preset} == dict(preset)


def test_a_preset_goes_by_its_name_and_beside_no_other_settings(tmp_path):
    assert _preset("flashrnn-165m", False, None) is FLASHRNN_165M
    assert _preset("demo", False, None) is _preset(None, True, tmp_path) is PRESETS["demo"]
    assert _preset(None, False, tmp_path) == {}
    with pytest.raises(UserError, match=r"--preset: expected one of demo, flashrnn-165m; got 'gpt'"):
        _preset("gpt", False, None)
    with pytest.raises(UserError, match="--preset: expected no --demo beside it"):
        _preset("demo", True, None)
    with pytest.raises(UserError, match="--preset: expected no --resume beside it"):
        _preset("demo", False, tmp_path)


# millions of parameters: of lstm and attention as the paper's Table 1 has them, whose slstm has no output projection
@pytest.mark.parametrize(
    ("mixer", "heads", "millions"),
    [("lstm", 12, 164), ("lstm", 1, 190), ("attention", 12, 162), ("gated-deltaproduct", 12, 212)]
    + [(mixer, 12, None) for mixer in MIXERS if mixer not in ("lstm", "attention", "gated-deltaproduct")],
)
def test_the_model_of_the_flashrnn_paper(mixer, heads, millions):
    config = LanguageModelConfig().changed(FLASHRNN_165M).changed({"mixer": mixer, "heads": heads})
    with torch.device("meta"):
        model = LanguageModel(mixer, config.layers, config.width, config.heads, config.vocabulary, config.tie)
    found = count_parameters(model) / 1e6
    assert int(found) == millions if millions else 140 < found < 200
    assert (config.warmup, config.floor, config.lr * config.floor) == (750, 0.1, pytest.approx(1e-4))
    # 8 GPUs of 80 GB take two parts each
    assert [config.parts(processes) for processes in (1, 4, 8)] == [16, 4, 2]


def test_the_schedule_is_told_or_follows():
    config = LanguageModelConfig(steps=5000, lr=0.1)
    assert [config.changed({"steps": n}).warmup for n in (7, 49, 50, 5000)] == [1, 4, 5, 200]
    assert config.changed({"warmup_steps": 0}).warmup == 0
    assert [config.changed({"min_lr": rate}).floor for rate in (None, 0.05, 0.0)] == [0.1, 0.5, 0]


def test_of_accumulate_and_local_batch_the_given_one_holds():
    config = LanguageModelConfig(batch=24)
    assert config.parts(2) == 1
    assert config.changed({"accumulate": 3}).parts(2) == 3
    assert config.changed({"local_batch": 2}).parts(2) == 6
    assert config.changed({"local_batch": 2}).changed({"accumulate": 3}).parts(2) == 3
    assert config.changed({"accumulate": 3}).changed({"local_batch": 2}).parts(4) == 3
    with pytest.raises(UserError, match="--local-batch: expected no --accumulate beside it"):
        config.changed({"accumulate": 3, "local_batch": 2})


def test_a_vocabulary_is_the_datas_or_rounded_up():
    assert LanguageModelConfig().rows_for(300, "text") == 300
    config = LanguageModelConfig(vocabulary=50304)
    assert config.rows_for(50257, "text") == config.rows_for(50304, "text") == 50304
    for tokens in (256, 50176, 50305):
        with pytest.raises(UserError, match=rf"--vocabulary: expected the {tokens:,} tokens of text, .* got 50,304"):
            config.rows_for(tokens, "text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer": "transformer"}, "--mixer: expected one of gla, .*; got 'transformer'"),
        ({"dtype": "int8"}, "--dtype: expected one of float32, bfloat16; got 'int8'"),
        ({"width": 100, "heads": 3}, r"--width: expected a multiple of --heads \(3\); got 100"),
        ({"validate_every": 0}, "--validate-every: expected 1 or more; got 0"),
        ({"layers": -1}, "--layers: expected 1 or more; got -1"),
        ({"mixer": "attention", "cp": 2}, "--cp: expected 1 for attention, whose tokens read all .*; got 2"),
        ({"seed": -1}, "--seed: expected 0 or more; got -1"),
        ({"local_batch": 0}, "--local-batch: expected 1 or more; got 0"),
        ({"warmup_steps": -1}, "--warmup-steps: expected 0 or more; got -1"),
        ({"threads": -1}, "--threads: expected 0 or more; got -1"),
        ({"data": "tokens", "text": "file"}, "--data: expected no --text or --glob beside it"),
        ({"data": "tokens", "glob": ("*.txt",)}, "--data: expected no --text or --glob beside it"),
        ({"vocabulary": 0}, "--vocabulary: expected 1 or more; got 0"),
        ({"min_lr": 0.1}, r"--min-lr: expected a learning rate from 0 to --lr \(0.002\); got 0.1"),
        ({"min_lr": -1.0}, "--min-lr: expected .*; got -1"),
        ({"lr": 0.0}, "--lr: expected a learning rate between 0 and 10; got 0.0"),
        ({"lr": float("nan")}, "--lr: expected .*; got nan"),
    ],
)
def test_wrong_values_are_named(change, message):
    with pytest.raises(UserError, match=message):
        LanguageModelConfig(**change)


def test_every_mixer_but_attention_is_a_class_of_holdfast_nn():
    from holdfast import nn

    assert [name for name, layer in MIXERS.items() if not hasattr(nn, layer)] == [ATTENTION]
