"""holdfast explain: plans, costs and reasons, without a GPU."""

import re

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.planner import tables

pytestmark = pytest.mark.usefixtures("no_table")


def explain(*arguments):
    return CliRunner().invoke(app, ["explain", *arguments])


def test_both_passes_with_their_costs():
    found = explain("simple_gla", "--shape", "B=4,T=4096,H=32,K=128,V=128", "--dtype", "bfloat16", "--device", "h200")
    assert found.exit_code == 0
    for words in ("\n  forward\n", "\n  backward\n", "bound by", "MiB", "Gop", "floor", "beat", "not      chunked:"):
        assert words in found.output, words


@pytest.mark.parametrize("op", ["gla", "intra_chunk"])
def test_calls_are_made_on_a_gpu_alone(op):
    found = explain(op, "--calls", "3")
    assert isinstance(found.exception, ValueError)
    assert f"calls: expected 0 for '{op}' on 'cpu'; got 3" in str(found.exception)


@pytest.mark.parametrize("op", ["inter_chunk_scan", "intra_chunk", "lstm", "rglru"])
def test_other_ops(op):
    found = explain(op, "--device", "rtx3090", "--dtype", "float16", "--no-grad")
    assert found.exit_code == 0
    assert found.output.startswith(f"{op} (")
    assert "\n  backward\n" not in found.output


def test_a_table_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "_in_use", [])
    (tmp_path / "h200.json").write_text("[1]")
    tables._read_once.cache_clear()
    found = explain("gla", "--device", "h200")
    assert isinstance(found.exception, tables.TableError)
    assert "expected an object; got list" in str(found.exception)
    tables._read_once.cache_clear()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("B=four", "--shape: expected AXIS=SIZE"),
        ("B=-1", "got 'B=-1'"),
        ("=4", "got '=4'"),
        ("B=2,B=3", "--shape: expected each axis once; got B=2 and B=3"),
        ("D=4", "sizes: expected axes among B, T, H, Hq, K, V; got 'D'"),
    ],
)
def test_a_bad_shape(shape, said):
    found = explain("gla", "--shape", shape)
    assert isinstance(found.exception, ValueError)
    assert said in str(found.exception)


def test_figures_are_written_without_exponents():
    text = explain("gla", "--shape", "B=1000,T=1000000,H=32,K=128,V=128", "--device", "h200").output
    assert "TiB" in text
    assert "Top" in text
    assert not re.search(r"\de[+-]", text)
