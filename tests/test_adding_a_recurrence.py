"""docs/adding-a-recurrence.md, followed to the letter on a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

TRIAL = """
from itertools import takewhile
import torch, holdfast
from holdfast.ops.verify import verify
from holdfast.recurrences import RECURRENCES
# doctor's tests verify the others
for name in set(RECURRENCES) - {"hgrn2"}:
    del RECURRENCES[name]
verdicts = list(takewhile(lambda v: v.op == "hgrn2", verify(torch.device("cpu"))))
assert {v.backend for v in verdicts if v.status == "right"} == {"chunked", "reference"}, verdicts
assert not any(v.status == "wrong" for v in verdicts), verdicts
q, v, g = torch.randn(1, 5, 2, 3), torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2, 3)
o, _ = holdfast.hgrn2(q, v, g)
S = torch.zeros(2, 3, 4)
for t in range(5):
    f = g[0, t].exp()[..., None]
    S = f * S + (1 - f) * v[0, t][:, None]
    torch.testing.assert_close(o[0, t], torch.einsum("hkv,hk->hv", S, q[0, t]))
print("right")
"""


def follow(page: str, root: Path) -> None:
    """Creates the files that the page names and inserts the lines that it says to add."""
    step = re.compile(
        r"Create `(?P<new>[^`]+)`:|(?:In `(?P<file>[^`]+)`, |and )after the line `(?P<line>[^`]+)`, add:"
        r"|```(?:python)?\n(?P<code>.*?)```",
        re.S,
    )
    path = line = None
    is_asked_for = False
    for found in step.finditer(page):
        if found["new"]:
            path, line, is_asked_for = root / found["new"], None, True
        elif found["line"]:
            path, line, is_asked_for = root / found["file"] if found["file"] else path, found["line"], True
        elif is_asked_for:
            is_asked_for = False
            if line is None:
                assert not path.exists(), f"{path} is there already"
                path.write_text(found["code"])
                continue
            lines = path.read_text().splitlines()
            assert lines.count(line) == 1, f"{line!r} stands {lines.count(line)} times in {path}"
            lines[lines.index(line) + 1 : lines.index(line) + 1] = found["code"].splitlines()
            path.write_text("\n".join(lines) + "\n")


def test_the_page_adds_a_recurrence(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    follow((ROOT / "docs" / "adding-a-recurrence.md").read_text(), tmp_path)
    command = [sys.executable, "-c", TRIAL]
    environment = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path / "src", capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
