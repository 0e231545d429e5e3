"""Does to a copy of the package what a page of the docs says to do."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

STEP = re.compile(
    r"Create `(?P<new>[^`]+)`:|(?:In `(?P<file>[^`]+)`, |and )after the line `(?P<line>[^`]+)`, add:"
    r"|```(?:python)?\n(?P<code>.*?)```",
    re.S,
)


def follow(page: str, root: Path) -> None:
    """Creates the files that the page names and inserts the lines that it says to add."""
    path = line = None
    is_asked_for = False
    for found in STEP.finditer(page):
        if found["new"]:
            path, line, is_asked_for = root / found["new"], None, True
        elif found["line"]:
            path, line, is_asked_for = root / found["file"] if found["file"] else path, found["line"], True
        elif is_asked_for:
            is_asked_for = False
            if line is None:
                assert not path.exists(), f"{path} is there already"
                path.parent.mkdir(exist_ok=True)
                path.write_text(found["code"])
                continue
            lines = path.read_text().splitlines()
            assert lines.count(line) == 1, f"{line!r} stands {lines.count(line)} times in {path}"
            lines[lines.index(line) + 1 : lines.index(line) + 1] = found["code"].splitlines()
            path.write_text("\n".join(lines) + "\n")


def followed(page: str, root: Path) -> Path:
    """A copy of src/ below root, after docs/<page> was followed in it."""
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    follow((ROOT / "docs" / page).read_text(), root)
    return root / "src"


def run(code: str, source: Path) -> subprocess.CompletedProcess[str]:
    """The code in a process that imports the package from `source`."""
    environment = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, env=environment)
