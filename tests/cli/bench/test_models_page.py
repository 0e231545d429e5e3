"""What is written of whole models, in the terminal and on the page, and at which sizes they are measured."""

import re
from dataclasses import asdict

import pytest

from holdfast.cli.bench.models.row import ModelsRecord, Row
from holdfast.cli.bench.models.scale import FULL, SMALL
from holdfast.cli.bench.models.section import section
from holdfast.cli.bench.models.words import kinds_of, line_of

STEP = {"B": 8, "T": 2048, "d": 768}
HOST = {"B": 2, "T": 512, "d": 768}
ATTENTION = Row("training", "attention", "eager", STEP, figures={"tokens_per_s": 1e5, "step_ms": 160.0})
SDPA = Row("host", "attention", "op scaled_dot_product_attention", HOST, figures={"host_us": 40.4})
DECODED = Row("decoding", "attention", "graph", {"B": 1}, figures={"tokens_per_s": 2000.0, "step_ms": 0.5})
LAYER = {"layer_ms": 3.0, "projections_ms": 1.5, "op_ms": 0.5, "over": 1.5, "host_ms": 0.25}


def trained(mixer="gla", mode="eager", part="training", sizes=STEP, status="ok", detail="", kinds=None, **figures):
    if status == "ok":
        figures = {"tokens_per_s": 1.5e5, "step_ms": 106.7} | figures
    return Row(part, mixer, mode, sizes, status, detail, figures=figures, kinds=kinds or {})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (trained(), "gla, eager, B8 T2048 d768: 150,000 tokens/s; 107 ms; 1.5 x attention"),
        (trained(mode="compiled"), "gla, compiled, B8 T2048 d768: 150,000 tokens/s; 107 ms"),
        (trained(part="longer"), "gla, eager, B8 T2048 d768: 150,000 tokens/s; 107 ms"),
        (trained(sizes=HOST), "gla, eager, B2 T512 d768: 150,000 tokens/s; 107 ms"),
        (
            trained(tokens_per_s=5e4, device_ms=99.0, memory_bytes=2**30, graphs=2.0, breaks=1.0),
            "gla, eager, B8 T2048 d768: 50,000 tokens/s; 107 ms; 0.5 x attention; 99 ms of the device; 1024 MiB; "
            "2 graphs, 1 breaks",
        ),
        (trained(tokens_per_s=1e5, graphs=1.0, breaks=0.0, kinds={"op": 1.0}),
         "gla, eager, B8 T2048 d768: 100,000 tokens/s; 107 ms; 1 x attention; op 100%"),
        (trained(tokens_per_s=1e5, graphs=1.0, breaks=3.0),
         "gla, eager, B8 T2048 d768: 100,000 tokens/s; 107 ms; 1 x attention; 1 graphs, 3 breaks"),
        (trained(status="failed", detail="no room"), "gla, eager, B8 T2048 d768: failed: no room"),
        (Row("host", "gla", "layer", HOST, figures={"host_us": 101.0}),
         "gla, layer, B2 T512 d768: 101 us of the host; 2.5 x attention's op"),
        (Row("layers", "gla", "model", STEP, figures=LAYER),
         "gla, model, B8 T2048 d768: 3 ms; 1.5 x projections 1.5 + op 0.5"),
        (Row("layers", "gla", "model", STEP, figures={"layer_ms": 3.0}), "gla, model, B8 T2048 d768: 3 ms"),
    ],
)  # fmt: skip
def test_a_row_in_a_line(row, said):
    assert line_of(row, [ATTENTION, SDPA, DECODED, row]) == said


def test_nothing_is_said_against_attention_without_it():
    assert line_of(trained(), [trained()]).endswith("107 ms")
    host = Row("host", "gla", "layer", HOST, figures={"host_us": 101.0})
    assert line_of(host, [host]).endswith("101 us of the host")
    # of another mode, or without figures, it is not the one
    layer = Row("host", "attention", "layer", HOST, figures={"host_us": 40.0})
    assert line_of(host, [layer, host]).endswith("101 us of the host")
    failed = Row("training", "attention", "eager", STEP, "failed", "no room")
    assert line_of(trained(), [failed, trained()]).endswith("107 ms")


def test_kinds_of_less_than_half_a_hundredth_are_left_out():
    row = trained(kinds={"op": 99.4, "norm": 0.6, "copy": 0.5, "other": 0.0})
    assert kinds_of(row) == "op 99%, norm 1%"
    assert kinds_of(trained(kinds={"op": 1.0, "norm": 3.0})) == "op 25%, norm 75%"


def record(*rows, **fields):
    given = {"device": {"name": "x"}, "versions": {"torch": "2.11", "cuda": ""}} | fields
    return ModelsRecord("holdfast bench", "2026-01-02T03:04:05", "abc", scale=asdict(FULL), rows=rows, **given)


def tables(text):
    """Title -> head and rows, without tags but for what is good or bad."""
    found = {}
    for title, rest in re.findall(
        r"<(?:h3|summary)>([^<]*)</(?:h3|summary)>(.*?)(?=<h3>|<summary>|$)", text, re.DOTALL
    ):
        rows = re.findall(r"<tr>(.*?)</tr>", re.sub(r"<br>", " ", rest), re.DOTALL)
        cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in rows]
        found[title] = [[re.sub(r'<span class="(\w+)">(.*?)</span>', r"\1 \2", cell) for cell in row] for row in cells]
    return found


def test_the_page_in_tables():
    rows = (
        ATTENTION,
        trained(memory_bytes=3 * 2**20, kinds={"op": 2.0, "projection": 1.25}),
        trained("slow", tokens_per_s=9e4),
        trained(part="longer", sizes={"B": 2, "T": 8192, "d": 768}),
        Row("layers", "gla", "defaults", STEP, figures=LAYER, kinds={"op": 0.5}),
        SDPA,
        Row("host", "gla", "layer", HOST, figures={"host_us": 101.0}),
        Row("host", "gla", "op gla", HOST, figures={"host_us": 60.6}),
        DECODED,
        trained("odd", status="missing", detail="No module"),
        trained("odd", mode="compiled", status="missing", detail="No module"),
        Row("host", "odd", "layer", HOST, "failed", "no room"),
    )
    found = tables(section(record(*rows), "m0", "Models"))
    assert found["Training: tokens a second"] == [
        ["mixer", "eager B8 T2048 d768", "eager B2 T8192 d768"],
        ["attention", "100,000 good 1 x", ""],
        ["gla", "150,000 good 1.5 x", "150,000"],
        ["slow", "90,000 bad 0.9 x", ""],
    ]
    assert found["Training: peak memory"] == [["mixer", "eager B8 T2048 d768"], ["gla", "3.0 MiB"]]
    heads = ["mixer", "sizes of", "layer ms", "projections ms", "op ms", "layer / (projections + op)", "host ms"]
    assert found["One layer"] == [heads, ["gla", "defaults", "3", "1.5", "0.5", "1.5", "0.25"]]
    layer = section(record(*rows), "m0", "Models").partition("One layer")[2].partition("</table>")[0]
    assert layer.count('class="left"') == 2 * 2, "of a head and a row the words alone begin at the left"
    assert found["Host time"] == [
        ["layer or op", "us", "x SDPA's"],
        ["op scaled_dot_product_attention", "40", "1"],
        ["gla", "101", "2.5"],
        ["op gla", "61", "1.5"],
    ]
    assert found["Decoding"] == [["mixer", "graph B1"], ["attention", "0.5"]]
    of = "Device time of a training step, eager, B8 T2048 d768"
    assert found["Device time of a layer, defaults, B8 T2048 d768"] == [
        ["mixer", "all ms", "op"],
        ["gla", "0.5", "0.5"],
    ]
    head, row = found[of]
    assert dict(zip(head, row, strict=True)) == {"mixer": "gla", "all ms": "3.25", "op": "2", "projection": "1.25"}
    assert found["Without figures"] == [
        ["mixer", "status", "rows", "why"],
        ["odd", "missing", "training eager, training compiled", "No module"],
        ["odd", "failed", "host layer", "no room"],
    ]


def test_what_was_run():
    rows = ATTENTION, trained(status="wrong"), trained(status="failed"), trained(status="missing")
    text = section(record(*rows), "m0", "Models")
    assert "1 right, 1 wrong, 1 failed, of 4; the run did not reach its end" in text
    assert "did not reach" not in section(record(*rows, complete=True), "m0", "Models")
    assert "16 blocks of width 768 with a vocabulary of 32000" in text
    assert "<dd>torch 2.11</dd>" in text
    assert re.findall(r"<h3>(.*?)</h3>", section(record(), "m0", "Models")) == []


def test_sizes_of_the_suite():
    """Runs of another day are held against those of today."""
    assert asdict(FULL) == {
        "width": 768, "head": 128, "narrow": 64, "blocks": 16, "vocabulary": 32000, "batch": 8, "length": 2048,
        "longer": (8192, 32768), "host": (2, 512), "checked": (2, 256), "decode_width": 1024, "decode_layers": 12,
        "decode_batches": (1, 64), "context": 2048, "compiler": "inductor",
    }  # fmt: skip
    assert asdict(SMALL) == {
        "width": 32, "head": 16, "narrow": 8, "blocks": 2, "vocabulary": 64, "batch": 2, "length": 16, "longer": (32,),
        "host": (1, 8), "checked": (1, 16), "decode_width": 32, "decode_layers": 2, "decode_batches": (1, 2),
        "context": 16, "compiler": "eager",
    }  # fmt: skip
    assert [FULL.batch_of(length) for length in (1024, 2048, 8192, 16384, 32768)] == [16, 8, 2, 1, 1]
