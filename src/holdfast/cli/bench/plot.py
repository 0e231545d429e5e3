"""Draws a group: time against size on logarithmic axes, the floor as a line, as SVG to be put into a page."""

import io
import re
from collections.abc import Sequence

from .groups import Group, axis_name, position

# mid-tones that stand out from white and from black, also for the colour-blind
_COLOURS = (
    "#0085ca",
    "#e0701a",
    "#1a9e77",
    "#c94f9c",
    "#8a6fd1",
    "#b58900",
    "#d6404a",
    "#5f8a1f",
    "#7a7f87",
    "#00a0a0",
)
_MARKERS = "osD^vPX<>*"
# stands for the page's own text colour until the SVG is written
_TEXT = "#0a0b0c"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.linewidth": 0.6,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "grid.color": _TEXT,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(group: Group, runners: Sequence[str], salt: str) -> str:
    """SVG of one group with an axis. runners: of the whole page, so that each keeps its colour; salt: makes the ids of
    this plot its own."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = group.axis()
    assert axis is not None
    with mpl.rc_context(_STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(8.2, 3.6), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        for n, runner in enumerate(runners):
            rows = sorted(
                (r for r in group.rows if r.runner == runner and r.median_ms), key=lambda r: position(r, axis)
            )
            if not rows:
                continue
            colour, marker = _COLOURS[n % len(_COLOURS)], _MARKERS[n % len(_MARKERS)]
            x, y = [position(r, axis) for r in rows], [r.median_ms for r in rows]
            axes.fill_between(x, [r.low_ms for r in rows], [r.high_ms for r in rows], color=colour, alpha=0.2, lw=0)
            axes.plot(x, y, color=colour, marker=marker, ms=5, lw=1.6, label=runner)
        floor = sorted({(position(r, axis), r.floor_ms) for r in group.rows if r.floor_ms})
        axes.plot(*zip(*floor, strict=True), color=_TEXT, ls=(0, (4, 3)), lw=1.2, label="floor")
        axes.set(xscale="log", yscale="log", xlabel=axis_name(axis), ylabel="milliseconds")
        ticks = [x for x, _ in floor]
        axes.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(True, lw=0.6)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    # ids such as text_1 are the same in every figure
    svg = re.sub(r'id="([A-Za-z.]+\w*_\d+)"', rf'id="{salt}-\1"', svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
