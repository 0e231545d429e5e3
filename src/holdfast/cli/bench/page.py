"""One self-contained HTML page from records."""

from collections.abc import Sequence
from html import escape

from .groups import Group, groups
from .plot import can_plot, draw
from .record import Record
from .result import Result
from .table import COLUMNS, cells

_CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bad: #c2313b; --dim: #777; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff7b83; --dim: #999; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 3rem; }
h3 { font-size: 1.02rem; margin: 2rem 0 .4rem; }
p, dl { margin: .4rem 0; } .dim, dt { color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
nav a { margin-right: 1rem; } code { font-size: .9em; }
svg { width: 100%; max-width: 52rem; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .22rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 16rem; color: var(--dim); }
tr.case td { text-align: left; background: var(--soft); color: inherit; font-weight: 600; }
tr.rejected td, tr.missing td { color: var(--dim); }
tr.wrong td, tr.failed td { color: var(--bad); }
"""
_HEADS = {
    "ms": "median, milliseconds",
    "quartiles": "first and third quartile, milliseconds",
    "x floor": "median / floor",
    "first s": "seconds of the first call, compilation included",
    "host ms": "milliseconds that the host spends on a call without waiting for the GPU",
    "memory": "peak memory beyond the inputs",
    "error": "largest relative error against the float64 oracle",
    "what": "why there is no time, or what to know about it",
}


def page(records: Sequence[Record]) -> str:
    """The page: what was measured with, then a plot and a table for each group of cases."""
    runners = list(dict.fromkeys(row.runner for record in records for row in record.rows))
    with_plots = can_plot()
    note = "" if with_plots else '<p class="dim">Without plots: matplotlib is not installed.</p>'
    links = "".join(f'<a href="#r{n}">{escape(_name(record))}</a>' for n, record in enumerate(records))
    sections = "\n".join(_record(record, n, runners, with_plots) for n, record in enumerate(records))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Holdfast benchmarks</title><style>{_CSS}</style></head><body>
<h1>Holdfast benchmarks</h1>
<p>Results are compared with a float64 step-by-step oracle first; where they are off, no time is given.
The floor is the time that the inputs and outputs alone take at the copy bandwidth measured in the same run.</p>
{note}<nav>{links}</nav>
{sections}
</body></html>
"""


def _name(record: Record) -> str:
    return f"{record.suite} on {record.device['name']}"


def _record(record: Record, number: int, runners: Sequence[str], with_plots: bool) -> str:
    roof = record.roofs
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g} Top/s" for dtype, rate in roof.rates.items())
    found = {status: sum(row.status == status for row in record.rows) for status in ("ok", "wrong", "failed")}
    facts = {
        "device": ", ".join(f"{value}" if key == "name" else f"{key} {value}" for key, value in record.device.items()),
        "roofs": f"copy {roof.copy_bandwidth / 1e9:.4g} GB/s (read + write), matrix product {rates}",
        "date, commit": f"{record.date}, {record.commit or 'unknown'}",
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items() if version),
        "rows": f"{found['ok']} timed, {found['wrong']} wrong, {found['failed']} failed, of {len(record.rows)}"
        + ("" if record.complete else "; the run did not reach its end"),
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    body = "\n".join(
        _group(group, f"r{number}g{n}", runners, with_plots) for n, group in enumerate(groups(record.rows))
    )
    return f"""<section id="r{number}"><h2>{escape(_name(record))}</h2>
<p>{escape(record.title)}. <code>{escape(record.command)}</code></p><dl>{listed}</dl>
{body}</section>"""


def _group(group: Group, salt: str, runners: Sequence[str], with_plots: bool) -> str:
    plot = draw(group, runners, salt) if with_plots and group.axis() else ""
    heads = "".join(f'<th title="{escape(_HEADS.get(column, ""))}">{escape(column)}</th>' for column in COLUMNS)
    rows = "\n".join(_case(members) for members in group.cases())
    return f"""<h3>{escape(group.title)}</h3>{plot}
<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table></div>"""


def _case(members: tuple[Result, ...]) -> str:
    floor = next((row.floor_ms for row in members if row.floor_ms), None)
    said = "" if floor is None else f" · floor {floor:.3g} ms"
    method = next((row.method for row in members if row.method), None)
    said += f" · {escape(method)}" if method else ""
    title = f'<tr class="case"><td colspan="{len(COLUMNS)}">{escape(members[0].case)}{said}</td></tr>'
    return title + "\n".join(
        f'<tr class="{row.status}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for row in members
    )
