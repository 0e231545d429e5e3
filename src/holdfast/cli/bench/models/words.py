"""Rows in words: in the terminal, and what the page shares with it."""

from collections.abc import Sequence

from ..table import mebibytes, milliseconds, ratio
from .row import Row


def against_attention(row: Row, rows: Sequence[Row]) -> float | None:
    """How fast the row is, attention's in the same part, mode and sizes being 1; None without one."""
    name = "tokens_per_s"
    of = [
        each
        for each in rows
        if each.mixer == "attention" and (each.part, each.mode, each.sizes) == (row.part, row.mode, row.sizes)
    ]
    if not of or not of[0].figures.get(name) or not row.figures.get(name):
        return None
    return row.figures[name] / of[0].figures[name]


def host_against_attention(row: Row, rows: Sequence[Row]) -> float | None:
    """Host time over that of scaled_dot_product_attention in the same run."""
    of = [each for each in rows if each.part == "host" and each.mode == "op scaled_dot_product_attention"]
    if not of or not of[0].figures.get("host_us") or not row.figures.get("host_us"):
        return None
    return row.figures["host_us"] / of[0].figures["host_us"]


def sizes_of(row: Row) -> str:
    """Such as "B8 T2048 d768"."""
    return " ".join(f"{axis}{size}" for axis, size in row.sizes.items())


def kinds_of(row: Row) -> str:
    """Each kind's share of the device time."""
    whole = sum(row.kinds.values())
    return ", ".join(f"{kind} {100 * ms / whole:.0f}%" for kind, ms in row.kinds.items() if ms > 0.005 * whole)


def _figures(row: Row, rows: Sequence[Row]) -> list[str]:
    figures = row.figures
    if row.part in ("training", "longer", "decoding"):
        said = [f"{figures['tokens_per_s']:,.0f} tokens/s", f"{milliseconds(figures['step_ms'])} ms"]
        if (speed := against_attention(row, rows)) is not None:
            said.append(f"{ratio(speed)} x attention")
        if figures.get("device_ms"):
            said.append(f"{milliseconds(figures['device_ms'])} ms of the device")
        if "memory_bytes" in figures:
            said.append(mebibytes(int(figures["memory_bytes"])))
        if figures.get("breaks") or figures.get("graphs", 1) > 1:
            said.append(f"{figures['graphs']:.0f} graphs, {figures['breaks']:.0f} breaks")
        return said
    if row.part == "host":
        said = [f"{figures['host_us']:.0f} us of the host"]
        times = host_against_attention(row, rows)
        return said if times is None else [*said, f"{ratio(times)} x attention's op"]
    said = [f"{milliseconds(figures['layer_ms'])} ms"]
    if "over" in figures:
        said.append(
            f"{ratio(figures['over'])} x projections {milliseconds(figures['projections_ms'])} + op "
            f"{milliseconds(figures['op_ms'])}"
        )
    return said


def line_of(row: Row, rows: Sequence[Row]) -> str:
    """One line about a row among those so far."""
    head = f"{row.mixer}, {row.mode}, {sizes_of(row)}: "
    if row.status != "ok":
        return f"{head}{row.status}: {row.detail}"
    said = _figures(row, rows)
    if row.kinds:
        said.append(kinds_of(row))
    return head + "; ".join(said)
