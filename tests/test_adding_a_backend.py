"""docs/adding-a-backend.md, followed to the letter on a copy of the package."""

import re

import kernel_rooms as rooms
from followed_page import ROOT, followed, run

TRIAL = """
import torch, holdfast
from holdfast.ops.explain import explain
from holdfast.ops.verify import verify
from holdfast.recurrences import RECURRENCES
# doctor's tests verify the others
for name in set(RECURRENCES) - {"hgrn", "rglru", "rotlru"}:
    del RECURRENCES[name]
verdicts = [v for v in verify(torch.device("cpu")) if v.backend == "doubling"]
status = {op: {v.status for v in verdicts if v.op == op} for op in ("hgrn", "rglru", "rotlru")}
assert "right" in status["hgrn"] and "right" in status["rglru"], verdicts
assert "right" not in status["rotlru"] and not any("wrong" in found for found in status.values()), verdicts

sizes = {"B": 2, "T": 64, "D": 32}
assert str(explain("hgrn", sizes, backend="doubling").plan) == "doubling"
assert explain("hgrn", sizes, device="h200").passed_over["doubling"].startswith("predicted")
assert "pairs of channels" in explain("rotlru", sizes).passed_over["doubling"]
assert explain("hgrn", sizes).plan.backend == "chunked"

for T in (0, 1, 2, 7, 8):
    x, g = torch.randn(1, T, 3, requires_grad=True), (-torch.rand(1, T, 3)).requires_grad_()
    h = torch.randn(1, 3, requires_grad=True)
    found = []
    for backend in ("doubling", "reference"):
        o, last = holdfast.hgrn(x, g, initial_state=h, output_final_state=True, backend=backend)
        found.append([o, last, *torch.autograd.grad(o.square().sum() + last.sum(), (x, g, h))])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)
print("right")
"""


def test_the_page_adds_a_backend(tmp_path):
    done = run(TRIAL, followed("adding-a-backend.md", tmp_path))
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_the_page_keeps_the_rules_of_the_house(tmp_path):
    source = followed("adding-a-backend.md", tmp_path) / "holdfast"
    added = [path for path in source.rglob("*.py") if not (ROOT / "src" / path.relative_to(tmp_path / "src")).exists()]
    assert len(added) == 3
    for check in (rooms.crossings, rooms.told_twice, rooms.past_the_backend, rooms.launches_elsewhere):
        assert check(source) == check(ROOT / "src" / "holdfast"), check
    listed = rooms.listed_stems((source / "kernels" / "README.md").read_text())
    assert {path.stem for path in added if "kernels" in path.parts} <= {"__init__", *listed}


def test_the_page_names_what_is_there():
    page = (ROOT / "docs" / "adding-a-backend.md").read_text()
    assert {"BackendVariants", "saved_shape"} <= set(re.findall(r"`(\w+)`", page))
    from holdfast.kernels.matrix.variants import BackendVariants, SavingVariant

    assert BackendVariants.variant
    assert SavingVariant.saved_shape
