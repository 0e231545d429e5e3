"""The integer problem that a plan comes from, in lines of text: choices, what they come to, limits and which binds."""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from holdfast.planner.report import Limit, Report

WIDTH = 100
# as far as the words of explain's other lines reach
INDENT = " " * 13
# of a row of numbers
SIDES = (str.ljust, str.rjust, str.ljust, str.rjust, str.ljust, str.rjust, str.ljust)


def told(report: Report) -> list[str]:
    """Lines of at most WIDTH columns, where no word is longer."""
    chosen = [f"{name} = {value:,} of {of}" for name, value, of in report.chosen]
    named = [f"{name} = {value:,}" + (f" = {text}" if text != str(value) else "") for name, value, text in report.named]
    binding = [_binding(limit) for limit in report.binding] or ["no limit: the values next to the chosen ones fit too"]
    fitting = "the only assignment that fits" if report.fitting == 1 else f"the fastest of {report.fitting} that fit"
    return [
        *_lines("chooses", [*chosen, fitting]),
        *_lines("where", named),
        *_lines("within", _aligned([_limit(limit) for limit in report.limits])),
        *_lines("binds", binding),
    ]


def _limit(limit: Limit) -> tuple[str, ...]:
    """In columns: what, taken, of how much, how much of it is left; or in words what holds."""
    if limit.taken is None or limit.room is None:
        return (limit.label, limit.text) if any(map(str.isalpha, limit.text)) else (limit.label,)
    return limit.label, f"{limit.taken:,}", "of", f"{limit.room:,}", limit.unit, f"{limit.slack:,}", "to spare"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Numbers end below one another; a row of words is as it is."""
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 2), strict=True)]
    return [
        " ".join([side(cell, width) for side, cell, width in zip(SIDES, row, widths, strict=True)])
        if len(row) > 2
        else ": ".join(row)
        for row in rows
    ]


def _binding(limit: Limit) -> str:
    if limit.taken is None:
        return (
            f"{limit.label}: no other value next to that of {', '.join(dict.fromkeys(stop[0] for stop in limit.stops))}"
        )
    stops = [f"{name} = {value:,} would take {taken:,} of {room:,}" for name, value, taken, room in limit.stops]
    return f"{limit.label}: {'; '.join(stops)}"


def _lines(word: str, texts: Iterable[str]) -> list[str]:
    """Each text on a line of its own, or several where it is too long, behind the word."""
    lines: list[str] = []
    for text in texts:
        fits = len(INDENT + text) <= WIDTH
        lines += [INDENT + text] if fits else wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + "  ")
    return [f"    {word:<8} {lines[0][len(INDENT) :]}", *lines[1:]] if lines else []
