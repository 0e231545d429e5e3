"""Parts of the page that say what a run comes to: each case at a glance, targets, counters, memory, first calls."""

from collections.abc import Iterable, Sequence
from html import escape
from operator import attrgetter

from .glance import Line, is_ours, lines
from .record import Record
from .result import Result
from .table import mebibytes, milliseconds, ratio
from .targets import Judged, judged, tables_of

_ms = attrgetter("median_ms")
_BADGES = {"met": "good", "missed": "bad", "not measured": "none"}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, css: str = "") -> str:
    """An HTML table of cells that are HTML already; the first `left` columns are words, the others figures."""
    head = "".join(f"<th{_side(n, left)}>{name}</th>" for n, name in enumerate(heads))
    body = "\n".join(
        "<tr>" + "".join(f"<td{_side(n, left)}>{cell}</td>" for n, cell in enumerate(r)) + "</tr>" for r in rows
    )
    return (
        f'<div class="wide"><table class="{css}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _side(n: int, left: int) -> str:
    return ' class="left"' if n < left else ""


def _who(row: Result | None) -> str:
    return "" if row is None else f'<span class="dim">{escape(row.runner.removeprefix("holdfast "))}</span>'


def _speed(line: Line) -> str:
    if line.speed is None:
        return ""
    mood = "good" if line.speed >= 1 else "bad"
    return f'<span class="{mood}">{ratio(line.speed)} x</span>'


def _bar(line: Line) -> str:
    """How much of the floor's speed is reached, as a bar."""
    if line.ours is None or not line.ours.floor_ratio:
        return ""
    share = min(100.0, 100.0 / line.ours.floor_ratio)
    times = f'<span class="times">{ratio(line.ours.floor_ratio)}</span>'
    return f'<span class="bar"><i style="width:{share:.1f}%"></i></span>{times}'


def glance(record: Record) -> str:
    """Every timed case in a line."""
    found = lines(record.rows)
    if not found:
        return ""
    rows = []
    for line in found:
        ours, peer = line.ours, line.peer
        rows.append(
            (
                escape(line.case),
                milliseconds(line.floor_ms),
                f"{milliseconds(ours.median_ms)} {_who(ours)}" if ours else "none",
                _bar(line),
                f"{milliseconds(peer.median_ms)} {_who(peer)}" if peer else "none",
                _speed(line),
            )
        )
    heads = ("case", "floor ms", "Holdfast ms", "x floor", "best peer ms", "speed")
    return "<h3>At a glance</h3>" + table(heads, rows, css="glance")


def _badge(found: Judged) -> str:
    return f'<span class="badge {_BADGES[found.verdict]}">{found.verdict}</span>'


def targets(record: Record) -> str:
    """The source document's table of metrics, filled in; a suite that is scaled down has nothing to say of them."""
    found = judged(record.suite, record.rows)
    if not found:
        return ""
    rows = [
        (
            escape(each.target.metric),
            escape(each.target.target),
            escape(each.measured),
            _badge(each),
            f'<span class="dim">{escape(each.target.note)}</span>',
        )
        for each in found
    ]
    met, missed = (sum(each.verdict == verdict for each in found) for verdict in ("met", "missed"))
    said = f"{met} met, {missed} missed, {len(found) - met - missed} not measured."
    said += " A target is met where every case that was measured is within it."
    heads = ("metric", "target", "measured", "verdict", "note")
    return f"<h3>Targets of the source</h3><p>{said}</p>" + table(heads, rows, 5, "targets")


def carried_tables(record: Record) -> str:
    """Tables that the suite brings along."""
    parts = []
    for each in tables_of(record.suite.removesuffix("-scaled")):
        rows = [[escape(cell) for cell in row] for row in each.rows]
        heads = [escape(name) for name in each.columns]
        parts.append(f"<h3>{escape(each.title)}</h3><p>{escape(each.note)}</p>" + table(heads, rows))
    return "".join(parts)


def counters(record: Record) -> str:
    """What the hardware counted beside what the planner said."""
    counted = [row for row in record.rows if row.dram_bytes is not None]
    failed = {row.counters_note for row in record.rows if row.counters_note}
    if not counted and not failed:
        return ""
    rows = []
    for row in counted:
        assert row.dram_bytes is not None
        against = row.dram_bytes / row.predicted_bytes if row.predicted_bytes else None
        mood = "" if against is None else ("good" if abs(against - 1) <= 0.15 else "bad")
        rows.append(
            (
                escape(row.case),
                escape(row.runner),
                mebibytes(row.floor_bytes),
                mebibytes(row.predicted_bytes),
                mebibytes(row.dram_bytes),
                f'<span class="{mood}">{against:.2f}</span>' if against else "",
                f"{row.tensor_percent:.0f}%",
                str(row.kernels or ""),
            )
        )
    notes = "".join(f"<p>No counters: {escape(note)}.</p>" for note in sorted(failed))
    heads = ("case", "runner", "fewest", "predicted", "DRAM", "DRAM / predicted", "matrix units", "kernels")
    return f"<h3>Hardware counters of one run</h3>{notes}" + (table(heads, rows, 2) if rows else "")


def memory(record: Record) -> str:
    """Peak memory of training beside the state after every step, for the suite whose document is about it."""
    if not record.suite.startswith("mlx-recurrence"):
        return ""
    rows = [
        (
            escape(row.case),
            escape(row.runner),
            mebibytes(row.memory_bytes),
            mebibytes(row.history_bytes),
            ratio(row.history_bytes / row.memory_bytes),
        )
        for row in record.rows
        if row.passes == "fwd+bwd" and row.history_bytes and row.memory_bytes
    ]
    note = (
        "<p>Peak beyond the inputs, outputs and gradients included, beside the state after every step in float32.</p>"
    )
    return f"<h3>Memory against the full history</h3>{note}" + table(
        ("case", "runner", "peak", "full history", "history / peak"), rows, 2
    )


def host(record: Record) -> str:
    """What a call costs the host."""
    rows = [
        (escape(row.case.removesuffix(" host")), escape(row.runner), f"{_ms(row) * 1e3:.0f}")
        for line in lines(record.rows, "host")
        for row in sorted((r for r in line.rows if r.median_ms), key=_ms)
    ]
    if not rows:
        return ""
    note = "<p>Microseconds of host time a call, of sizes that keep the device idle; nothing waits for the device.</p>"
    return f"<h3>Host time a call</h3>{note}" + table(("case", "runner", "us a call"), rows, 2)


def first_calls(record: Record) -> str:
    """Cold first calls, ours and the peers'."""
    rows = [row for row in record.rows if row.first_call_s is not None]
    if not rows:
        return ""
    cells = [
        (escape(row.case), ("<b>%s</b>" if is_ours(row) else "%s") % escape(row.runner), f"{row.first_call_s:.1f}")
        for row in sorted(rows, key=lambda row: (row.op, row.passes, row.first_call_s or 0))
    ]
    note = f"<p>Seconds, {escape(record.first_calls)}.</p>" if record.first_calls else ""
    return (
        f"<details><summary>First calls ({len(cells)})</summary>{note}"
        + table(("case", "runner", "first call s"), cells, 2)
        + "</details>"
    )
