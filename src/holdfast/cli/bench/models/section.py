"""The suite's part of the page: whole models first, then where their time goes."""

from collections.abc import Callable, Sequence
from html import escape

from ..sections import table
from ..table import mebibytes, milliseconds, ratio
from .kinds import KINDS
from .row import ModelsRecord, Row
from .words import against_attention, host_against_attention, sizes_of

Cell = Callable[[Row, Sequence[Row]], str]


def section(record: ModelsRecord, anchor: str, name: str) -> str:
    """One record as a section of the page."""
    rows = record.rows
    parts = [_facts(record), _speeds(rows), _layers(rows), _host(rows), _decoding(rows), _kinds(rows), _left_out(rows)]
    return f'<section id="{anchor}"><h2>{escape(name)}</h2>\n' + "\n".join(filter(None, parts)) + "</section>"


def _facts(record: ModelsRecord) -> str:
    scale, found = record.scale, [row.status for row in record.rows]
    statuses = {"right": "ok", "wrong": "wrong", "failed": "failed"}
    counts = ", ".join(f"{found.count(status)} {said}" for said, status in statuses.items())
    facts = {
        "device": str(record.device["name"]),
        "date, commit": f"{record.date}, {record.commit or 'unknown'}",
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items() if version),
        "rows": f"{counts}, of {len(found)}" + ("" if record.complete else "; the run did not reach its end"),
    }
    said = (
        f"Language models of {scale['blocks']} blocks of width {scale['width']} with a vocabulary of "
        f"{scale['vocabulary']}, trained in bfloat16 by autocast with fused AdamW; each mixer in attention's place."
    )
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f"<p>{escape(said)} <code>{escape(record.command)}</code></p><dl>{listed}</dl>"


def _by_mixer(title: str, note: str, rows: Sequence[Row], cell: Cell) -> str:
    """A line a mixer, a column for each mode and size."""
    columns = list(dict.fromkeys((row.mode, sizes_of(row)) for row in rows))
    found = {(row.mixer, row.mode, sizes_of(row)): row for row in rows}
    lines = [
        [escape(mixer), *(cell(row, rows) if (row := found.get((mixer, *column))) else "" for column in columns)]
        for mixer in dict.fromkeys(row.mixer for row in rows)
    ]
    heads = ["mixer", *(f"{escape(mode)}<br>{escape(sizes)}" for mode, sizes in columns)]
    return f"<h3>{title}</h3><p>{note}</p>" + table(heads, lines) if rows else ""


def _beside(value: float | None, good: bool) -> str:
    return "" if value is None else f' <span class="{"good" if good else "bad"}">{ratio(value)} x</span>'


def _ok(rows: Sequence[Row], *parts: str) -> list[Row]:
    return [row for row in rows if row.part in parts and row.status == "ok"]


def _tokens(row: Row, rows: Sequence[Row]) -> str:
    speed = against_attention(row, rows)
    return f"{row.figures['tokens_per_s']:,.0f}" + _beside(speed, (speed or 0) >= 1)


def _speeds(rows: Sequence[Row]) -> str:
    found = _ok(rows, "training", "longer")
    speeds = _by_mixer(
        "Training: tokens a second", "Beside them, attention's at the same sizes being 1.", found, _tokens
    )
    memory = [row for row in found if "memory_bytes" in row.figures]
    note = "Weights, gradients and the optimizer's state included."
    return speeds + _by_mixer(
        "Training: peak memory", note, memory, lambda row, _: mebibytes(int(row.figures["memory_bytes"]))
    )


def _layers(rows: Sequence[Row]) -> str:
    found = _ok(rows, "layers")
    if not found:
        return ""
    names = ("layer_ms", "projections_ms", "op_ms", "over", "host_ms")
    lines = [
        [escape(row.mixer), escape(row.mode)]
        + [(ratio if name == "over" else milliseconds)(row.figures.get(name)) for name in names]
        for row in found
    ]
    heads = ("mixer", "sizes of", "layer ms", "projections ms", "op ms", "layer / (projections + op)", "host ms")
    note = (
        "Both passes of one layer; beside it the matrix products of its projections alone, and its op alone on inputs "
        f"that need nothing done to them. {sizes_of(found[0])}."
    )
    return f"<h3>One layer</h3><p>{escape(note)}</p>" + table(heads, lines, 2)


def _host(rows: Sequence[Row]) -> str:
    found = _ok(rows, "host")
    if not found:
        return ""
    lines = []
    for row in found:
        what = row.mixer if row.mode == "layer" else row.mode
        lines.append([escape(what), f"{row.figures['host_us']:.0f}", ratio(host_against_attention(row, rows))])
    note = f"Forward and backward in eager mode, the device not waited for. {sizes_of(found[0])}."
    return f"<h3>Host time</h3><p>{note}</p>" + table(("layer or op", "us", "x SDPA's"), lines)


def _decoding(rows: Sequence[Row]) -> str:
    note = "Milliseconds of one token through all layers, a sequence of the batch each; attention after its context."
    return _by_mixer("Decoding", note, _ok(rows, "decoding"), lambda row, _: milliseconds(row.figures["step_ms"]))


def _kinds(rows: Sequence[Row]) -> str:
    parts = []
    groups: dict[str, list[Row]] = {}
    for row in _ok(rows, "training", "longer", "layers"):
        if row.kinds:
            what = "a layer" if row.part == "layers" else "a training step"
            groups.setdefault(f"{what}, {row.mode}, {sizes_of(row)}", []).append(row)
    for title, members in groups.items():
        shown = [kind for kind in KINDS if any(kind in row.kinds for row in members)]
        lines = [
            [escape(row.mixer), milliseconds(sum(row.kinds.values())), *(milliseconds(row.kinds.get(k)) for k in shown)]
            for row in members
        ]
        parts.append(
            f"<details><summary>Device time of {escape(title)}</summary>"
            + table(("mixer", "all ms", *shown), lines)
            + "</details>"
        )
    return "".join(["<h3>Device time by kind of kernel, milliseconds</h3>", *parts]) if parts else ""


def _left_out(rows: Sequence[Row]) -> str:
    """What has no figures, and why; rows of one reason in one line."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            reasons.setdefault((row.mixer, row.status, row.detail), []).append(f"{row.part} {row.mode}")
    lines = [
        [escape(mixer), escape(status), escape(", ".join(dict.fromkeys(what))), escape(detail)]
        for (mixer, status, detail), what in reasons.items()
    ]
    return "<h3>Without figures</h3>" + table(("mixer", "status", "rows", "why"), lines, 4, "targets") if lines else ""
