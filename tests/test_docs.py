"""The docs cannot go stale: the table is what the backends say, every recurrence has a page, every example runs."""

import itertools
import re
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.ops.families import backends_of, problem_of
from holdfast.planner import Device
from holdfast.recurrences import RECURRENCES, Draw, Sizes

ROOT = Path(__file__).parents[1]
# pages that are followed by tests of their own
FOLLOWED = {"adding-a-recurrence.md", "adding-a-cell.md", "adding-an-mlx-scan.md", "parallel.md"}
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{n}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name not in FOLLOWED
    for n, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


def serves(backend, recurrence) -> bool:
    """Whether the backend takes any ordinary call of the recurrence on any of three devices."""
    for dtype, length, grad in itertools.product((torch.bfloat16, torch.float32), (64, 1), (False, True)):
        arguments = recurrence.example(Draw(0, dtype, "meta"), Sizes(B=2, T=length, H=4, Hq=4, K=64, V=64, D=64))
        problem = problem_of(recurrence, arguments, None, grad)
        if any(backend.reject(problem, Device.named(name)) is None for name in ("cpu", "a100", "h200")):
            return True
    return False


def table() -> str:
    """The README's table of recurrences and backends."""
    lines = ["| recurrence | op | family | backends |", "| --- | --- | --- | --- |"]
    for name, recurrence in RECURRENCES.items():
        backends = ", ".join(f"`{backend.name}`" for backend in backends_of(recurrence) if serves(backend, recurrence))
        link = f"[`{name}`](docs/recurrences/{name}.md)"
        lines.append(f"| {recurrence.title} | {link} | {recurrence.family} | {backends} |")
    return "\n".join(lines)


def test_the_readme_has_the_table_of_recurrences_and_backends():
    assert table() in (ROOT / "README.md").read_text(), f"the README's table should read:\n{table()}"


@pytest.mark.parametrize("name", RECURRENCES)
def test_every_recurrence_has_a_page(name):
    recurrence = RECURRENCES[name]
    page = (ROOT / "docs" / "recurrences" / f"{name}.md").read_text()
    missing = [f"`{argument}" for argument in recurrence.arguments if f"`{argument}" not in page]
    missing += [f"`{backend.name}`" for backend in backends_of(recurrence) if f"`{backend.name}`" not in page]
    missing += [part for part in ("## Cost", "```python", "arXiv") if part not in page and part not in recurrence.paper]
    assert not missing, f"docs/recurrences/{name}.md does not mention {missing}"


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run_as_pasted(code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if "from transformers import" in code:
        pytest.importorskip("transformers", reason="needs transformers, which pip install 'holdfast[dev]' brings")
    if "import mlx" in code:
        pytest.importorskip("mlx.core", reason="needs mlx, which pip install 'holdfast[mlx]' brings")
    assert code.strip()
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_every_name_at_the_top_level_is_there():
    assert set(RECURRENCES) <= set(holdfast.__all__)
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast.ops.__all__) <= set(holdfast.__all__)


def test_links_lead_somewhere():
    broken = []
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken
