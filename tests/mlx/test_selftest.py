"""`python -m holdfast.mlx.selftest`, on the path that this machine has and on Metal's sources."""

import re

import mlx.core as mx
import pytest

from holdfast.mlx import selftest


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without Metal; this one has it")
def test_it_says_which_path_it_checked(capsys):
    assert selftest.main() == 2
    printed = capsys.readouterr().out
    assert "the plain path (mlx has no Metal device here; this mlx has no CUDA back end)" in printed
    assert "No kernel was checked" in printed
    assert "WRONG" not in printed
    ratios = [float(r) for r in re.findall(r"([\d.]+) times as much", printed)]
    assert len(ratios) == 2
    assert min(ratios) >= 18


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without Metal; this one has it")
@pytest.mark.parametrize("path", ["metal", "cuda"])
def test_a_path_that_does_not_run_here(capsys, path):
    assert selftest.main(["--path", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"backend: '{path}' cannot run: ")


def test_parts_are_all_of_it(capsys):
    """Every trial is in one part; without a table."""
    labels = [trial.label for trial in selftest.trials()]
    found = []
    for part in ("1/6", "2/6", "3/6", "4/6", "5/6", "6/6"):
        assert selftest.main(["--path", "mlx", "--part", part]) == 2
        out = capsys.readouterr().out
        assert "full history" not in out
        found += re.findall(r"^  (.*?) +float32", out, re.M)
    assert sorted(found) == sorted(labels)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b"])
def test_a_part_that_is_none(capsys, part):
    with pytest.raises(SystemExit):
        selftest.main(["--part", part])
    assert "expected I/N with I from 1 to N" in capsys.readouterr().err


def test_the_kernels_pass_it(metal, capsys, monkeypatch):
    """Its first trial of each kind of scan, by the Metal sources; mx.compile needs kernels that mlx launches."""
    some = list(selftest.trials())
    monkeypatch.setattr(selftest, "trials", lambda: [some[0], some[1], some[5], some[-3]])
    assert selftest.check(is_compiled=False)
    assert len(metal.named("gla_backward")) == 6
    assert capsys.readouterr().out.count("right") == 12


def test_a_wrong_scan_fails_it(monkeypatch, capsys):
    trial = next(iter(selftest.trials()))
    right = trial.function

    def wrong(*xs, initial_state, backend):
        y, final = right(*xs, initial_state=initial_state)
        return y * 1.001, final

    object.__setattr__(trial, "function", wrong)
    monkeypatch.setattr(selftest, "trials", lambda: [trial])
    assert selftest.main() == 1
    assert "WRONG, limit 2.0e-05" in capsys.readouterr().out


def test_the_table(metal, capsys, monkeypatch):
    selftest.measure(B=1, L=8, H=1, P=8, N=4, runs=1)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.fullmatch(r"  \S.* +[\d.]+ +[\d.]+ +\d+", line)]
    assert len(rows) == 9
    assert {"selective_backward", "gla_history_backward"} <= {launch.kernel for launch in metal.launches}
