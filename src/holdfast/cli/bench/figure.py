"""What all figures of a page share: style, colours of the runners, and how they become SVG inside HTML."""

import io
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

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
TEXT = "#0a0b0c"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.linewidth": 0.6,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": TEXT,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def look(runner: str, runners: Sequence[str]) -> dict[str, Any]:
    """Colour and marker of a runner, the same in every figure of a page. runners: all of the page."""
    n = list(runners).index(runner)
    # the second ten get other markers with the colours of the first
    return {"color": _COLOURS[n % 10], "marker": _MARKERS[(n + 3 * (n // 10)) % 10]}


def svg(paint: Callable[[Any, Any], None], salt: str, height: float = 3.6) -> str:
    """What paint(figure, axes) draws, as SVG whose text takes the page's colour. salt: makes its ids its own."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(8.2, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        paint(figure, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = found[found.index("<svg") :].replace(TEXT, "currentColor")
    # ids such as text_1 are the same in every figure
    found = re.sub(r'id="([A-Za-z.]+\w*_\d+)"', rf'id="{salt}-\1"', found)
    return re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
