"""The README's chart, of the README's own table of times beside peers: `python benchmarks/chart.py`.

Writes docs/drawings/peers.svg: how many times as fast as the fastest peer each row is, forward and both passes.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "docs/drawings/peers.svg"
ROW = re.compile(r"^\| (.+?) \| ([\d.]+) / ([\d.]+) \| (.+?) ([\d.]+) / ([\d.]+|-) \|$", re.M)
LEFT, UNIT, HEIGHT, BARS = 250, 26, 48, {"forward": "#4051b5", "both passes": "#9aa5e0"}
# times as fast that the chart has room for; a bar that is longer ends there, and says its number
MOST = 17


def rows(readme: str) -> list[tuple[str, str, list[float | None]]]:
    """(what, peer, how many times as fast forward and in both passes); None where the peer has no such pass."""
    found = []
    for what, forward, both, peer, peer_forward, peer_both in ROW.findall(readme):
        times = [float(peer_forward) / float(forward), None if peer_both == "-" else float(peer_both) / float(both)]
        found.append((what.replace("`", "").partition(" B")[0].partition(",")[0], peer, times))
    return found


def chart(readme: str) -> str:
    table = rows(readme)
    width, height = LEFT + UNIT * MOST + 60, HEIGHT * len(table) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img"><title>Times as fast as the fastest peer, on an H200</title>',
        "<style>text{font:13px system-ui,sans-serif;fill:#222;dominant-baseline:central}.peer{font-size:11px;fill:#666}"
        ".what{text-anchor:end}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff" rx="6"/>',
        f'<text x="{LEFT}" y="18">times as fast as the fastest peer, on an H200</text>',
    ]
    for n, (name, color) in enumerate(BARS.items()):
        x = LEFT + 310 + 90 * n
        parts += [
            f'<rect x="{x}" y="12" width="11" height="11" fill="{color}"/><text x="{x + 16}" y="18">{name}</text>'
        ]
    for n, (what, peer, times) in enumerate(table):
        y = 42 + HEIGHT * n
        parts += [f'<text class="what" x="{LEFT - 8}" y="{y + 10}">{what}</text>']
        parts += [f'<text class="what peer" x="{LEFT - 8}" y="{y + 26}">{peer}</text>']
        for (color, time), top in zip(zip(BARS.values(), times, strict=True), (y, y + 18), strict=True):
            if time is not None:
                long = UNIT * min(time, MOST)
                parts += [f'<rect x="{LEFT}" y="{top}" width="{long:.1f}" height="15" fill="{color}"/>']
                parts += [f'<text x="{LEFT + long + 6:.1f}" y="{top + 8}">{time:.1f}</text>']
    one = LEFT + UNIT
    parts += [f'<path d="M{one} 36V{height - 14}" stroke="#222" stroke-dasharray="3 3"/>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    CHART.write_text(chart((ROOT / "README.md").read_text()))
