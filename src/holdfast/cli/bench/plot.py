"""Figures of results: time against size, the roofline, error over the steps."""

from collections.abc import Sequence
from typing import Any

from .figure import TEXT, look, svg
from .groups import Group, axis_name, position
from .result import Result
from .roofs import Roofs

_DASHED = {"color": TEXT, "ls": (0, (4, 3)), "lw": 1.2}
_LEGEND = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}


def draw(group: Group, runners: Sequence[str], salt: str) -> str:
    """Time against size on logarithmic axes, quartiles as bands, the floor as a line: SVG of one group with an axis.

    runners: of the whole page, so that each keeps its colour. salt: makes the ids of this figure its own.
    """
    axis = group.axis()
    assert axis is not None

    def paint(figure: Any, axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        for runner in runners:
            rows = sorted(
                (r for r in group.rows if r.runner == runner and r.median_ms), key=lambda r: position(r, axis)
            )
            if not rows:
                continue
            style, x = look(runner, runners), [position(r, axis) for r in rows]
            band = {"color": style["color"], "alpha": 0.2, "lw": 0}
            axes.fill_between(x, [r.low_ms for r in rows], [r.high_ms for r in rows], **band)
            axes.plot(x, [r.median_ms for r in rows], ms=5, lw=1.6, label=runner, **style)
        floor = sorted({(position(r, axis), r.floor_ms) for r in group.rows if r.floor_ms})
        if floor:
            axes.plot(*zip(*floor, strict=True), label="floor", **_DASHED)
        axes.set(xscale="log", yscale="log", xlabel=axis_name(axis), ylabel="milliseconds")
        ticks = sorted({position(r, axis) for r in group.rows if r.median_ms})
        axes.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(True, lw=0.6)
        axes.legend(**_LEGEND)

    return svg(paint, salt)


def roofline_rows(rows: Sequence[Result]) -> list[Result]:
    """Rows that have a place in a roofline: timed, with operations and bytes to count."""
    return [row for row in rows if row.kind == "time" and row.median_ms and row.operations and row.floor_bytes]


def roofline(rows: Sequence[Result], roofs: Roofs, runners: Sequence[str], salt: str) -> str:
    """Arithmetic speed against operations a byte, beneath what the copy bandwidth and the matrix rates allow.

    Operations are the definition's. Bytes are those that DRAM counters saw, filled markers, or else the fewest
    possible, hollow ones.
    """
    shown = roofline_rows(rows)

    def place(row: Result) -> tuple[float, float]:
        assert row.operations
        assert row.median_ms
        return row.operations / (row.dram_bytes or row.floor_bytes or 1), row.operations / row.median_ms / 1e9

    def paint(figure: Any, axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        for runner in runners:
            for counted in (True, False):
                places = [place(r) for r in shown if r.runner == runner and (r.dram_bytes is not None) == counted]
                if places:
                    style = look(runner, runners)
                    label = runner if not counted or all(r.dram_bytes for r in shown if r.runner == runner) else None
                    face = style["color"] if counted else "none"
                    axes.plot(*zip(*places, strict=True), ls="", ms=5.5, mfc=face, label=label, **style)
        places = [place(row) for row in shown]
        slope = roofs.copy_bandwidth / 1e12
        top = max(roofs.rates.values()) / 1e12
        left = min(min(x for x, _ in places), 1.0) / 2
        right = max(max(x for x, _ in places), top / slope) * 2
        axes.plot([left, top / slope], [left * slope, top], color=TEXT, lw=1.2)
        for dtype, rate in roofs.rates.items():
            axes.plot([rate / 1e12 / slope, right], [rate / 1e12] * 2, color=TEXT, lw=1.2)
            axes.annotate(f"{dtype} product", (right, rate / 1e12), (-2, 3), textcoords="offset points", ha="right")
        axes.annotate(
            "copy bandwidth", (left * 1.2, left * slope * 1.2), (0, 6), textcoords="offset points", rotation=28
        )
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="10¹² operations a second")
        axes.minorticks_off()
        for each in (axes.xaxis, axes.yaxis):
            each.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(True, lw=0.6)
        axes.legend(**_LEGEND)

    return svg(paint, salt, height=4.2)


def error_plot(rows: Sequence[Result], runners: Sequence[str], salt: str) -> str:
    """Absolute error of the output over the steps, a line for each percentile and runner; the largest is drawn full."""
    dashes = {"50": (0, (1, 2)), "90": (0, (4, 2)), "100": "-"}

    def paint(figure: Any, axes: Any) -> None:
        for row in rows:
            colour = look(row.runner, runners)["color"]
            for level, values in (row.step_errors or {}).items():
                label = f"{row.runner}, {'largest' if level == '100' else level + '%'}"
                steps = range(1, len(values) + 1)
                axes.plot(steps, values, color=colour, ls=dashes.get(level, "-"), lw=1.2, label=label)
        axes.set(yscale="log", xlabel="step", ylabel="absolute error")
        axes.grid(True, lw=0.6)
        axes.legend(**_LEGEND)

    return svg(paint, salt)
