"""What the page says of a run, in numbers; what its figures draw; and that suites stay what was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.bench import page, plot, sections
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.figure import look, svg
from holdfast.cli.bench.groups import groups
from holdfast.cli.bench.record import Record, is_record, read
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.roofs import Roofs
from holdfast.cli.bench.suites import SUITES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ROOF = Roofs(copy_bandwidth=4e12, rates={"bfloat16": 8e14, "float32": 5e13}, copy_bytes=1, matrix_size=1)
CASES = [Case("gla", (("B", 1), ("T", T), ("H", 1), ("K", 8), ("V", 8)), "bfloat16", "fwd+bwd") for T in (16, 2048)]


def row(runner="holdfast triton", ms=2.0, case=CASES[0], **figures):
    taken = {"low_ms": 0.9 * ms, "high_ms": 1.1 * ms} if ms else {}
    return replace(of_case(case, runner, "ok"), median_ms=ms, **taken | figures)


def record(*rows, suite="some", **fields):
    return replace(
        Record(suite, "Title", "holdfast bench", "2026-01-02T03:04:05", "abc", {"name": "x"}, {}, ROOF, rows), **fields
    )


def cells(text):
    """Of the table's body, without tags."""
    rows = re.findall(r"<tr>(.*?)</tr>", text[text.index("<tbody>") :], flags=re.DOTALL)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", each)] for each in rows]


def test_each_case_at_a_glance():
    rows = [row(floor_ms=1.0, floor_ratio=2.0), row("holdfast chunked", 9.0), row("fla chunk", 3.0)]
    rows += [
        row(case=CASES[1], ms=4.0),
        row("fla chunk", 1.0, CASES[1]),
        row("fla x", 7.0, replace(CASES[1], passes="fwd")),
    ]
    text = sections.glance(record(*rows))
    assert cells(text) == [
        [str(CASES[0]), "1", "2 triton", "2", "3 fla chunk", "1.5 x"],
        [str(CASES[1]), "", "4 triton", "", "1 fla chunk", "0.25 x"],
        [str(replace(CASES[1], passes="fwd")), "", "none", "", "7 fla x", ""],
    ]
    assert 'style="width:50.0%"' in text
    assert re.findall(r'<span class="(good|bad)">', text) == ["good", "bad"]
    assert sections.glance(record()) == ""


def test_as_fast_is_good_and_no_bar_is_longer_than_the_whole():
    text = sections.glance(record(row(floor_ms=1.0, floor_ratio=0.5), row("fla chunk", 2.0)))
    assert '<span class="good">1 x' in text
    assert 'style="width:100.0%"' in text


def test_counters_in_a_table():
    counted = row(dram_bytes=2**21, predicted_bytes=2**20, floor_bytes=2**19, tensor_percent=12.6, kernels=3)
    text = sections.counters(record(counted, row(ms=1.0), replace(counted, predicted_bytes=None)))
    assert cells(text)[0] == [str(CASES[0]), "holdfast triton", "0.5 MiB", "1.0 MiB", "2.0 MiB", "2.00", "13%", "3"]
    assert cells(text)[1][5] == ""
    assert len(cells(text)) == 2
    assert sections.counters(record(row())) == ""


def test_memory_and_host_and_first_calls_in_tables():
    both = row(memory_bytes=2**20, history_bytes=18 * 2**20)
    forward = row(case=replace(CASES[0], passes="fwd"), memory_bytes=1, history_bytes=1)
    assert cells(sections.memory(record(both, forward, suite="mlx-recurrence"))) == [
        [str(CASES[0]), "holdfast triton", "1.0 MiB", "18 MiB", "18"]
    ]
    assert sections.memory(record(both)) == ""
    host = replace(CASES[0], kind="host")
    text = sections.host(record(row("fla chunk", 0.5, host), row(ms=0.0214, case=host), row()))
    assert cells(text) == [[str(CASES[0]), "holdfast triton", "21"], [str(CASES[0]), "fla chunk", "500"]]
    text = sections.first_calls(
        record(row(first_call_s=2.25), row("fla chunk", first_call_s=1.5), row(), first_calls="cold")
    )
    assert cells(text) == [[str(CASES[0]), "fla chunk", "1.5"], [str(CASES[0]), "holdfast triton", "2.2"]]
    assert "<b>holdfast triton</b>" in text
    assert "First calls (2)" in text
    assert "Seconds, cold." in text


def test_words_stand_at_the_left_and_figures_at_the_right():
    """Of each table as many columns are words as here."""
    both = row(memory_bytes=2, history_bytes=3, first_call_s=1.0, dram_bytes=1, tensor_percent=1.0)
    host = row(case=replace(CASES[0], kind="host"))
    run = record(both, host, suite="mlx-recurrence")
    for part, words in (
        (sections.glance, 1), (sections.counters, 2), (sections.memory, 2), (sections.host, 2),
        (sections.first_calls, 2), (sections.targets, 5),
    ):  # fmt: skip
        text = part(run)
        assert {each.count('class="left"') for each in re.findall("<tr>.*?</tr>", text, re.DOTALL)} == {words}
        assert re.search(r'<tr><th class="left">', text)


def test_verdicts_are_counted():
    text = sections.targets(record(row(memory_bytes=2, history_bytes=48), suite="mlx-recurrence"))
    met, missed, rest = map(int, re.search(r"<p>(\d+) met, (\d+) missed, (\d+) not measured\.", text).groups())
    found = [re.sub("<.*?>", "", each[3]) for each in cells(text)]
    assert (met, missed, rest) == tuple(found.count(verdict) for verdict in ("met", "missed", "not measured"))
    assert met + missed + rest == len(found) > 0


@pytest.mark.parametrize(("dram", "mood"), [(84, "bad"), (86, "good"), (114, "good"), (116, "bad")])
def test_a_prediction_is_good_within_fifteen_hundredths(dram, mood):
    text = sections.counters(record(row(dram_bytes=dram, predicted_bytes=100, tensor_percent=1.0)))
    assert f'<span class="{mood}">' in text


def test_runners_that_draw_nothing_take_no_colour_and_ours_come_first(monkeypatch):
    found = []
    monkeypatch.setattr(page, "can_plot", lambda: True)
    monkeypatch.setattr(page, "_record", lambda records, n, names, runners, plots: found.append(runners) or "")
    errors = row("holdfast loop", None, step_errors={"50": [1.0]})
    page.page([record(row("fla chunk"), errors, row("gone", None), row("holdfast triton"))])
    assert found == [["holdfast loop", "holdfast triton", "fla chunk"]]


def test_facts_of_a_run():
    rows = (row(method="events"), row(status="wrong", ms=None), row(status="failed", ms=None), row(method="events"))
    found = record(*rows, device={"name": "H200", "sms": 132}, versions={"torch": "2.11", "cuda": ""}, complete=False)
    text = page._facts(found)
    for words in (
        "H200, sms 132", "copy 4000 GB/s", "bfloat16 800 Top/s, float32 50 Top/s", "<dd>events</dd>",
        "2026-01-02T03:04:05, abc", "<dd>torch 2.11</dd>",
        "2 right, 1 wrong, 1 failed, of 4; the run did not reach its end",
    ):  # fmt: skip
        assert words in text, words
    assert "did not reach" not in page._facts(replace(found, complete=True))
    assert ", unknown" in page._facts(replace(found, commit=""))


def test_a_long_command_is_folded():
    assert page._command("a < b") == "<code>a &lt; b</code>"
    assert page._command("x" * 199).startswith("<code>")
    assert page._command("x" * 200).startswith("<details>")


def test_a_record_is_repeated_by_a_later_whole_one_of_its_suite_and_device():
    first, second = record(row()), record(row(), row(case=CASES[1]), date="2026-01-03T00:00:00")
    assert page._repeated(first, [first, second]) == 1
    assert page._repeated(second, [first, second]) is None
    for change in ({"complete": False}, {"suite": "other"}, {"device": {"name": "y"}}, {"date": first.date}):
        assert page._repeated(first, [first, replace(second, **change)]) is None
    assert page._repeated(replace(first, rows=(row(case=replace(CASES[0], dtype="float32")),)), [second]) is None


class Axes:
    """Keeps what is drawn."""

    def __init__(self):
        self.lines, self.bands, self.words, self.ticks = [], [], [], None
        self.xaxis = self.yaxis = self

    def plot(self, x, y, **style):
        self.lines.append((style.get("label"), list(x), list(y), style))

    def fill_between(self, x, low, high, **style):
        self.bands.append((list(x), list(low), list(high)))

    def annotate(self, text, place, *rest, **style):
        self.words.append((text, place))

    def set_xticks(self, places, labels):
        self.ticks = dict(zip(labels, places, strict=True))

    def __getattr__(self, name):
        return lambda *arguments, **options: None


@pytest.fixture
def drawn(monkeypatch):
    pytest.importorskip("matplotlib")
    axes = Axes()
    monkeypatch.setattr(plot, "svg", lambda paint, salt, **options: paint(None, axes) or salt)
    return axes


def test_a_plot_has_medians_quartiles_and_the_floor(drawn):
    rows = [row(case=CASES[1], ms=8.0, floor_ms=4.0), row(floor_ms=1.0), row("fla chunk", 3.0)]
    (group,) = groups(rows)
    plot.draw(group, ["holdfast triton", "fla chunk", "nobody"], "s")
    assert [line[:3] for line in drawn.lines] == [
        ("holdfast triton", [16, 2048], [2.0, 8.0]), ("fla chunk", [16], [3.0]), ("floor", [16, 2048], [1.0, 4.0]),
    ]  # fmt: skip
    assert drawn.bands[0] == ([16, 2048], pytest.approx([1.8, 7.2]), pytest.approx([2.2, 8.8]))
    assert drawn.ticks == {"16": 16, "2048": 2048}


def test_a_roofline_has_its_roofs_and_each_row_at_its_intensity(drawn):
    counted = row(ms=1.0, operations=10**12, floor_bytes=10**9, dram_bytes=2 * 10**9)
    hollow = row("fla chunk", 2.0, operations=10**12, floor_bytes=10**9)
    assert plot.roofline_rows([counted, hollow, row(), row(ms=None, operations=1, floor_bytes=1)]) == [counted, hollow]
    plot.roofline([counted, hollow, row()], ROOF, ["holdfast triton", "fla chunk"], "s")
    (ours, theirs), roofs = drawn.lines[:2], drawn.lines[2:]
    # operations a byte that was counted, or of the fewest; 10^12 operations a second
    assert (ours[1], ours[2], theirs[1], theirs[2]) == ([500.0], [1000.0], [1000.0], [500.0])
    assert (ours[3]["mfc"] == ours[3]["color"], theirs[3]["mfc"]) == (True, "none")
    # the slope of the copy bandwidth meets the fastest product, then each product's own line
    assert roofs[0][1:3] == ([0.5, 200.0], [2.0, 800.0])
    assert roofs[1][1:3] == ([200.0, 2000.0], [800.0, 800.0])
    assert roofs[2][1:3] == ([12.5, 2000.0], [50.0, 50.0])


def test_errors_are_drawn_from_the_first_step(drawn):
    plot.error_plot([row(step_errors={"50": [0.1, 0.2], "100": [0.3, 0.4]})], ["holdfast triton"], "s")
    assert [line[:3] for line in drawn.lines] == [
        ("holdfast triton, 50%", [1, 2], [0.1, 0.2]), ("holdfast triton, largest", [1, 2], [0.3, 0.4]),
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "height"), [({}, 259.2), ({"height": 4.2}, 302.4)])
def test_a_figure_has_the_size_that_it_is_given(options, height):
    """8.2 inches wide, 3.6 high unless told; 72 points are an inch."""
    pytest.importorskip("matplotlib")
    found = svg(lambda figure, axes: axes.plot([1, 2], [3, 4]), "s", **options)
    assert re.search(r'<svg [^>]*viewBox="([^"]*)"', found)[1] == f"0 0 590.4 {height}"
    assert "currentColor" in found


def test_looks_differ_for_twenty_runners():
    names = [str(n) for n in range(20)]
    looks = [tuple(look(name, names).values()) for name in names]
    assert len(set(looks)) == 20
    assert len({colour for colour, _ in looks}) == 10


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: path.stem)
def test_what_was_measured_is_still_a_case_of_its_suite(path):
    """Results of another day can be held against those of today."""
    if not is_record(path):
        return
    kept = read(path)
    scaled = kept.suite.endswith("-scaled")
    suite = SUITES[kept.suite.removesuffix("-scaled")]
    assert {row.case for row in kept.rows} <= {str(case) for case in suite.cases(scaled)}
