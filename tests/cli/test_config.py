"""Settings: defaults, checks, and the way through a checkpoint."""

import pytest

from holdfast.cli.config import ATTENTION, DEMO, MIXERS, LanguageModelConfig
from holdfast.cli.errors import UserError


def test_round_trip():
    config = LanguageModelConfig(mixer="mamba2", width=96, heads=3, glob=("*.md", "a/*.txt"), text="/a/b")
    assert LanguageModelConfig.from_dict(config.to_dict()) == config


def test_to_dict_holds_plain_values_only():
    plain = (str, int, float, list, type(None))
    assert all(type(value) in plain for value in LanguageModelConfig(glob=("*.py",)).to_dict().values())


def test_from_dict_names_odd_settings():
    with pytest.raises(UserError, match="colour, width"):
        LanguageModelConfig.from_dict(
            {n: v for n, v in LanguageModelConfig().to_dict().items() if n != "width"} | {"colour": 1}
        )


def test_changed_ignores_what_is_not_given():
    assert LanguageModelConfig().changed({"width": 64, "steps": None}) == LanguageModelConfig(width=64)


def test_demo_is_valid():
    config = LanguageModelConfig().changed(DEMO)
    assert {name: getattr(config, name) for name in DEMO} == dict(DEMO)


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
