"""holdfast doctor --fuzz, --scenarios and --replay."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.errors import UserError
from holdfast.cli.fuzz import fuzz, replay
from holdfast.fuzz.draw import draw
from holdfast.fuzz.row import Row

RIGHT = "op=gla device=cpu seed=3 B=1 T=5 H=1 Hq=1 K=4 V=4"


def doctor(*options):
    return CliRunner().invoke(app, ["doctor", *map(str, options)])


@pytest.mark.slow
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
        (["--replay", RIGHT, "--scenarios", 3], "--replay: runs one scenario"),
        (["--fuzz", 3, "--scenarios", 3, "--device", "meta"], "--device meta"),
        (["--scenarios", 3, "--device", "meta"], "--device meta"),
        (["--fuzz", 3, "--device", "meta"], "--device meta"),
        (["--seed", 3], "--seed: belongs to --fuzz or --scenarios"),
    ],
)
def test_wrong_options_are_the_users_error(options, said):
    done = doctor(*options)
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)


def test_options_reach_the_fuzzer(monkeypatch, tmp_path):
    asked, out = [], tmp_path / "rows.jsonl"
    monkeypatch.setattr("holdfast.cli.fuzz.fuzz", lambda *given: asked.append(given))
    monkeypatch.setattr("holdfast.fuzz.workers.default_workers", lambda kind: {"cpu": 5}[kind])
    assert doctor("--fuzz", 0, "--seed", 7, "--device", "cpu", "--workers", 2, "--out", out).exit_code == 0
    assert doctor("--scenarios", 3, "--device", "cpu").exit_code == 0
    assert asked == [(0.0, None, 7, "cpu", 2, out), (None, 3, 0, "cpu", 5, None)]


class Told:
    """Stands for the pool of workers: rows that are given, of each status that there is."""

    limit = 60.0

    def __init__(self, workers, begin, check):
        assert workers == 3
        self.environment = {"torch": "2"}

    def rows(self, lines, until=None):
        statuses = ["right", "refused", "refused", "wrong", "raised", "crashed", "hung"]
        for n, line in zip(range(200), lines, strict=False):
            status = statuses[n] if n < len(statuses) else "right"
            yield Row(line, status, f"T is {n}" if status != "right" else "", calls=2, tensors=5)


def test_what_came_is_counted_and_failures_can_be_run_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("holdfast.fuzz.workers.Pool", Told)
    with pytest.raises(typer.Exit) as end:
        fuzz(None, None, 7, "cpu", 3, tmp_path / "rows.jsonl")
    assert end.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [draw(7, index, "cpu").line() for index in range(3, 7)]
    assert lines[1:8:2] == [f'  holdfast doctor --replay "{line}"' for line in failed]
    assert lines[:8:2] == ["wrong: T is 3", "raised: T is 4", "crashed: T is 5", "hung: T is 6"]
    counted = "2 refused, 1 wrong, 1 raised, 1 crashed, 1 hung, in 0 s"
    assert lines[8:] == [
        f"100 scenarios, 200 calls, 500 tensors compared: {counted}",
        f"200 scenarios, 400 calls, 1000 tensors compared: {counted}",
        "refused 2 times: T is N",
        f"200 scenarios, 400 calls, 1000 tensors compared: {counted}",
    ]
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(kept) == 202
    assert {name: kept[0][name] for name in ("seed", "device", "workers", "limit_s")} == {
        "seed": 7, "device": "cpu", "workers": 3, "limit_s": 60.0,
    }  # fmt: skip
    assert kept[-1]["totals"]["right"] == 194


def test_a_replayed_line_says_what_came_nearest_to_its_limit(monkeypatch, capsys):
    def rows(pool, lines):
        return [Row(lines[0], "right", calls=2, tensors=5, name="o", error=1.25e-3, limit=0.0125, seconds=1.26)]

    monkeypatch.setattr("holdfast.fuzz.workers.Pool", lambda workers, *rest: SimpleNamespace(rows=partial(rows, None)))
    replay(RIGHT)
    assert capsys.readouterr().out.splitlines() == [
        "right",
        "nearest to its limit: o, off by 0.0013, limit 0.013",
        "2 calls, 5 tensors compared, in 1.3 s",
    ]
