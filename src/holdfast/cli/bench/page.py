"""One self-contained HTML page from records."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from . import sections
from .figure import can_plot
from .glance import is_ours
from .groups import Group, groups
from .models.row import ModelsRecord
from .models.section import section
from .plot import draw, error_plot, roofline, roofline_rows
from .record import Record
from .result import Result
from .table import COLUMNS, cells

_CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_HEADS = {
    "ms": "median, milliseconds",
    "quartiles": "first and third quartile, milliseconds",
    "x floor": "median / floor",
    "first s": "seconds of the first call in a cold process, compilation included",
    "host ms": "milliseconds that the host spends on a call without waiting for the GPU",
    "memory": "peak memory beyond the inputs",
    "error": "largest relative error against the float64 oracle",
    "what": "why there is no time, or what to know about it",
}


def page(records: Sequence[Record], models: Sequence[ModelsRecord] = ()) -> str:
    """The page: whole models, then for each other record what it was measured with, what it comes to, and a plot and a
    table for each group."""
    # those that have something to draw: there are fewer colours than runners
    drawn = dict.fromkeys(
        row.runner for record in records for row in record.rows if row.median_ms is not None or row.step_errors
    )
    runners = sorted(drawn, key=lambda name: not name.startswith("holdfast"))
    with_plots = can_plot()
    note = "" if with_plots else '<p class="dim">Without plots: matplotlib is not installed.</p>'
    names = _names(records)
    links = "".join(f'<a href="#r{n}">{escape(name)}</a>' for n, name in enumerate(names))
    titles = [f"Models on {each.device['name']}, {each.date[:16].replace('T', ' ')}" for each in models]
    whole = "\n".join(section(each, f"m{n}", titles[n]) for n, each in enumerate(models))
    links = "".join(f'<a href="#m{n}">{escape(title)}</a>' for n, title in enumerate(titles)) + links
    sections_ = "\n".join(_record(records, n, names, runners, with_plots) for n in range(len(records)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Holdfast benchmarks</title><style>{_CSS}</style></head><body>
<h1>Holdfast benchmarks</h1>
<p>Results are compared with float64 first; where they are off, no time is given.
The floor is the time that the inputs and outputs alone take at the copy bandwidth measured in the same run.
"Holdfast" in a line is the fastest of its backends, "best peer" the fastest other implementation of the same function.
</p>
{note}<nav>{links}</nav>
{whole}
{sections_}
</body></html>
"""


def _names(records: Sequence[Record]) -> list[str]:
    """Suite and device; where another record has the same, its op, if it has one alone, and its date too."""
    names = [f"{record.suite} on {record.device['name']}" for record in records]
    found = []
    for name, record in zip(names, records, strict=True):
        ops = {row.op for row in record.rows}
        op = f", {ops.pop()}" if len(ops) == 1 else ""
        found.append(f"{name}{op}, {record.date[:16].replace('T', ' ')}" if names.count(name) > 1 else name)
    return found


def _repeated(record: Record, records: Sequence[Record]) -> int | None:
    """Which later record of the suite and the device has all cases of this one again, if one has."""
    cases = {row.case for row in record.rows}
    for n, other in enumerate(records):
        same = (other.suite, other.device["name"]) == (record.suite, record.device["name"])
        if same and other.complete and other.date > record.date and cases <= {row.case for row in other.rows}:
            return n
    return None


def _command(command: str) -> str:
    """Folded where it is long."""
    code = f"<code>{escape(command)}</code>"
    return code if len(command) < 200 else f"<details><summary>The command</summary>{code}</details>"


def _facts(record: Record) -> str:
    roof = record.roofs
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g} Top/s" for dtype, rate in roof.rates.items())
    found = {status: sum(row.status == status for row in record.rows) for status in ("ok", "wrong", "failed")}
    methods = dict.fromkeys(row.method for row in record.rows if row.method)
    facts = {
        "device": ", ".join(f"{value}" if key == "name" else f"{key} {value}" for key, value in record.device.items()),
        "roofs": f"copy {roof.copy_bandwidth / 1e9:.4g} GB/s (read + write), matrix product {rates}",
        "times": "; ".join(methods),
        "date, commit": f"{record.date}, {record.commit or 'unknown'}",
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items() if version),
        "rows": f"{found['ok']} right, {found['wrong']} wrong, {found['failed']} failed, of {len(record.rows)}"
        + ("" if record.complete else "; the run did not reach its end"),
    }
    return "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items() if value)


def _record(
    records: Sequence[Record], number: int, names: Sequence[str], runners: Sequence[str], with_plots: bool
) -> str:
    record = records[number]
    if (again := _repeated(record, records)) is None:
        targets = sections.targets(record)
    else:
        targets = f'<p>All of it was measured again: <a href="#r{again}">{escape(names[again])}</a>.</p>'
    timed = [row for row in record.rows if row.kind == "time"]
    body = "\n".join(_group(group, f"r{number}g{n}", runners, with_plots) for n, group in enumerate(groups(timed)))
    figures = _figures(record, f"r{number}", runners) if with_plots else ""
    others = "\n".join(_rows(group) for group in groups(row for row in record.rows if row.kind != "time"))
    return f"""<section id="r{number}"><h2>{escape(names[number])}</h2>
<p>{escape(record.title)}. {_command(record.command)}</p><dl>{_facts(record)}</dl>
{targets}{sections.glance(record)}{sections.memory(record)}{sections.counters(record)}{figures}
{sections.host(record)}{sections.carried_tables(record)}{sections.first_calls(record)}
<h3>All rows</h3>
{body}
{others}</section>"""


def _figures(record: Record, salt: str, runners: Sequence[str]) -> str:
    parts = []
    if roofline_rows(record.rows):
        note = "Operations are those of the step-by-step definition; bytes are what DRAM counters saw (filled) or the "
        note += "fewest possible (hollow)."
        picture = roofline(record.rows, record.roofs, runners, f"{salt}roof")
        parts.append(f"<h3>Roofline</h3><p>{note}</p>{picture}")
    for n, group in enumerate(groups(row for row in record.rows if row.step_errors)):
        picture = error_plot(group.rows, runners, f"{salt}e{n}")
        cases = ", ".join(dict.fromkeys(row.case for row in group.rows))
        parts.append(f"<h3>{escape(group.title)}</h3><p>{escape(cases)}</p>{picture}")
    return "".join(parts)


def _group(group: Group, salt: str, runners: Sequence[str], with_plots: bool) -> str:
    if not group.axis() or not with_plots:
        return _rows(group)
    return f"<h4>{escape(group.title)}</h4>{draw(group, runners, salt)}{_rows(group)}"


def _rows(group: Group) -> str:
    heads = "".join(f'<th title="{escape(_HEADS.get(column, ""))}">{escape(column)}</th>' for column in COLUMNS)
    rows = "\n".join(_case(members) for members in group.cases())
    return f"""<details><summary>{escape(group.title)}: all rows ({len(group.rows)})</summary>
<div class="wide"><table class="rows"><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table></div></details>"""


def _css(row: Result) -> str:
    return f"{row.status} ours" if is_ours(row) else row.status


def _case(members: tuple[Result, ...]) -> str:
    floor = next((row.floor_ms for row in members if row.floor_ms), None)
    said = "" if floor is None else f" · floor {floor:.3g} ms"
    method = next((row.method for row in members if row.method), None)
    said += f" · {escape(method)}" if method else ""
    title = f'<tr class="case"><td colspan="{len(COLUMNS)}">{escape(members[0].case)}{said}</td></tr>'
    return title + "\n".join(
        f'<tr class="{_css(row)}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for row in members
    )
