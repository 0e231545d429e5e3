"""holdfast doctor --fuzz, --scenarios and --replay."""

import json

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.errors import UserError
from holdfast.fuzz.draw import draw

RIGHT = "op=gla device=cpu seed=3 B=1 T=5 H=1 Hq=1 K=4 V=4"


def doctor(*options):
    return CliRunner().invoke(app, ["doctor", *map(str, options)])


def test_a_slice_runs_and_is_kept(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = doctor("--scenarios", 4, "--fuzz", 300, "--seed", 55, "--device", "cpu", "--workers", 1, "--out", out)
    assert done.exit_code == 0, done.output
    assert "4 scenarios, " in done.output
    first, *rows, last = map(json.loads, out.read_text().splitlines())
    assert first["environment"]["torch"]
    assert first["seed"] == 55
    assert [row["line"] for row in rows] == [draw(55, index, "cpu").line() for index in range(4)]
    assert last["totals"]["scenarios"] == 4
    assert last["totals"]["tensors"] == sum(row["tensors"] for row in rows)


def test_a_replayed_line_that_fails_fails():
    done = doctor("--replay", RIGHT + " mode=nonsense")
    assert done.exit_code == 1
    assert done.output.startswith("raised: KeyError: 'nonsense'")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replay", "op=gla"], "replay: expected device and seed"),
        (["--replay", RIGHT, "--fuzz", 3], "--replay: runs one scenario"),
        (["--fuzz", 3, "--device", "meta"], "--device meta"),
        (["--seed", 3], "--seed: belongs to --fuzz or --scenarios"),
    ],
)
def test_wrong_options_are_the_users_error(options, said):
    done = doctor(*options)
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)
