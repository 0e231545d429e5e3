"""holdfast explain --ranks: a layer over several GPUs, without any."""

import re

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.scale import layer_around, layouts, packed_bytes, rows_exchanged
from holdfast.ops.explain import explain
from holdfast.parallel import Sections
from holdfast.planner import Device

pytestmark = pytest.mark.usefixtures("no_table")
SHAPE = {"B": 4, "T": 8192, "H": 16, "K": 128, "V": 128}


def layer(op="gla", device="h200", dtype="bfloat16", width=None, **sizes):
    return layer_around(op, SHAPE | sizes if op not in ("lstm", "rglru") else sizes, dtype, device, width)


def op_seconds(op="gla", **sizes):
    return sum(x.chosen.seconds for x in explain(op, SHAPE | sizes, "bfloat16", "h200").passes)


def test_weights_of_layers():
    """Projections, and a SwiGLU of 3 d x 8/3 d."""
    d = 16 * 128
    assert layer().weights == 5 * d * d + 8 * d * d
    assert layer(width=1024, Hq=4).weights == 1024 * (2 * 4 * 128 + 3 * d) + 8 * 1024**2
    assert layer("rglru", B=1, T=9, D=64).weights == 5 * 64 * 64 + 8 * 64 * 64
    assert layer("lstm", B=1, T=9, H=4, D=16).weights == 4 * 64 * 64 + 4 * 4 * 16 * 16 + 8 * 64 * 64


def test_a_layer_by_itself_is_its_op_and_its_products():
    products = 6 * layer().weights * 4 * 8192 / Device.named("h200").reached_tensor_rate
    assert layer().seconds() == pytest.approx(op_seconds() + products)
    assert layer(device="cpu").seconds() is None


def test_each_way_has_its_part():
    found, refused = layouts(layer(), 4)
    weights, rate = layer().weights, Device.named("h200").reached_tensor_rate
    products = 6 * weights * 4 * 8192 / rate / 4
    expected = {
        "cp": ("T 2048", 2 * op_seconds(T=2048)),
        "tp": ("H 4", op_seconds(H=4)),
        "fsdp": ("B 1", op_seconds(B=1)),
        "ddp": ("B 1", op_seconds(B=1)),
    }
    assert refused == {}
    assert {x.name: x.share for x in found[1:]} == {name: share for name, (share, _) in expected.items()}
    for each in found[1:]:
        assert each.seconds == pytest.approx(expected[each.name][1] + products)
    state = 4 * 4 * (16 * 128 * 128 + 16 * 128)
    sent = {x.name: (x.waits, x.meanwhile) for x in found}
    assert sent == {
        "one GPU": (0, 0),
        "cp": (2 * 3 * state, 2 * 3 * weights),
        "tp": (4 * 2 * 3 / 4 * 4 * 8192 * 2048 * 2 + packed_bytes(layer(), 4), 0),
        "fsdp": (0, 3 * 3 * weights),
        "ddp": (0, 2 * 3 * weights),
    }
    (_, delta, *_), _ = layouts(layer("delta_rule"), 4)
    assert delta.seconds == pytest.approx(3 * op_seconds("delta_rule", T=2048) + products)


def test_rows_of_packed_weights_that_change_hands():
    """Of q and k of 4 heads of 8, and values and gates of 16, two ranks hold q, k and half of v, or the rest."""
    small = layer(width=48, H=4, K=8, V=16)
    # of 192 rows: the first sends the second halves of q and k and takes that of v, of 16, 16 and 32 rows
    assert rows_exchanged(Sections((32, 32, 64, 64), (4, 4, 4, 4)), 0, 2) == 16 + 16 + 32
    # of the MLP's gate and value of 128 rows it holds all of the gate, and half of each is wanted
    assert packed_bytes(small, 2) == 4 * 48 * (64 + 64 + 64)


def test_ways_that_do_not_fit_say_why():
    assert layouts(layer("lstm", B=6, T=9, H=4, D=16), 4)[1] == {
        "cp": "the time of a nonlinear recurrence cannot be cut",
        "fsdp and ddp": "B = 6 is no multiple of 4",
    }
    assert layouts(layer(Hq=2), 4)[1] == {"tp": "Hq = 2 is no multiple of 4"}


def test_the_command_tells_them():
    shape = ",".join(f"{axis}={size}" for axis, size in SHAPE.items())
    line = ["explain", "gla", "--shape", shape, "--dtype", "bfloat16", "--device", "h200", "--ranks", "4"]
    said = CliRunner().invoke(app, [*line, "--link", "ib"]).output
    assert "  4 ranks by ib, 50 GB/s each way: a layer of width 2048 with 54,525,952 weights, both passes" in said
    rows = dict(re.findall(r"^    (cp|tp|fsdp|ddp) +(.*)$", said, re.M))
    assert rows.keys() == {"cp", "tp", "fsdp", "ddp"}
    assert all(re.fullmatch(r"[THB] \d+( +[\d.]+ (ms|MiB)){3,4} +\d\.\d{3}", row) for row in rows.values()), rows
    assert CliRunner().invoke(app, line[:-2]).output == said[: said.index("  4 ranks by")]


def test_what_has_no_layer_is_refused():
    found = CliRunner().invoke(app, ["explain", "intra_chunk", "--ranks", "2"])
    assert "--ranks: expected a recurrence" in str(found.exception)
    found = CliRunner().invoke(app, ["explain", "gla", "--ranks", "2", "--varlen", "--link", "ib"])
    assert "--ranks: expected neither --varlen nor --no-grad" in str(found.exception)
