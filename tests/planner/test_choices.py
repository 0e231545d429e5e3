"""A name that is none of those that there are: which ones there are, and which was meant."""

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.planner import Device
from holdfast.planner.choices import no_choice


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("gated_deltanet", "; did you mean 'gated-deltanet'?"),
        ("GatedDeltaNet", "; did you mean 'gated-deltanet'?"),
        ("gated-deltane", "; did you mean 'gated-deltanet'?"),
        ("transformer", ""),
        (None, ""),
    ],
)
def test_the_nearest_is_named(got, meant):
    assert no_choice("--mixer", ["gla", "gated-deltanet"], got) == (
        f"--mixer: expected one of gla, gated-deltanet; got {got!r}{meant}"
    )


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (["train", "lm", "--mixer", "GatedDeltaNet"], "gated-deltanet"),
        (["explain", "gated-delta-rule"], "gated_delta_rule"),
        (["explain", "gla", "--device", "h-200"], "h200"),
        (["bench", "--op", "simple-gla", "--shape", "B=1"], "simple_gla"),
        (["bench", "--suite", "smok"], "smoke"),
    ],
)
def test_commands_name_it(command, meant):
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert f"did you mean '{meant}'?" in " ".join((done.output + str(done.exception)).split())


def test_ops_name_it():
    with pytest.raises(ValueError, match="did you mean 'gated_delta_rule'"):
        holdfast.step("GatedDeltaRule", {}, None)
    with pytest.raises(ValueError, match="did you mean 'rtx4090'"):
        Device.named("RTX 4090")
