"""The docs cannot go stale: the table is what the backends say, every recurrence has a page, every example runs."""

import ast
import fnmatch
import importlib.util
import io
import itertools
import re
import tokenize
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.ops.families import backends_of, problem_of
from holdfast.planner import Device
from holdfast.recurrences import RECURRENCES, Draw, Sizes

ROOT = Path(__file__).parents[1]
# pages that are followed by tests of their own
FOLLOWED = {
    *("adding-a-backend.md", "adding-a-cell.md", "adding-a-recurrence.md", "adding-an-mlx-scan.md"),
    "parallel.md",
}
EXAMPLES = [
    # a tutorial trains a model
    pytest.param(code, id=f"{path.name}-{n}", marks=[pytest.mark.slow] if path.parent.name == "tutorials" else [])
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
        pytest.importorskip("mlx.core", reason="needs mlx, which pip install -e packaging/holdfast-mlx brings")
    assert code.strip()
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_every_name_at_the_top_level_is_there():
    assert set(RECURRENCES) <= set(holdfast.__all__)
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast.ops.__all__) <= set(holdfast.__all__)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ +(.*?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_anchor(root: Path) -> list[str]:
    """Places where code says a page of notes whole, or a page or heading of the docs that does not exist."""
    found = []
    for folder in ("src", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".py", ".cu", ".cuh"}:
                continue
            text = path.read_text()
            said = prose(path, text) if "docs/" in text else ""
            for page, anchor in re.findall(r"\bdocs/([\w/-]+)\.md(?:#([\w-]+))?", said):
                target = root / "docs" / f"{page}.md"
                may_be_whole = not page.startswith("notes/") and not anchor
                if not target.exists() or not (may_be_whole or anchor in anchors(target)):
                    found.append(f"{path.relative_to(root)}: {page}#{anchor}")
    return found


def pages(root: Path) -> list[Path]:
    """Those of the docs, and the ones that lie beside what they are about."""
    top = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    below = [path for folder in ("docs", "src") for path in sorted((root / folder).rglob("*.md"))]
    return [*(page for page in top if page.exists()), *below]


def broken_anchors(root: Path) -> list[str]:
    """Links in the docs to a heading that the page does not have."""
    found = []
    for path in pages(root):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
            page = path.parent / target if target else path
            if "://" not in target and page.suffix == ".md" and anchor not in anchors(page):
                found.append(f"{path.relative_to(root)}: {target}#{anchor}")
    return found


def unlisted_notes(root: Path) -> list[str]:
    """Pages of notes that the index leaves out or asks another question than they answer."""
    folder = root / "docs" / "notes"
    index = (folder / "README.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| \[[^\]]*\]\(([^)]+)\) \|$", index, re.M))
    asked = {page: question for question, page in rows.items()}
    found = []
    for path in sorted(folder.glob("*.md")):
        if path.name != "README.md" and path.read_text().splitlines()[0] != f"# {asked.get(path.name)}":
            found.append(path.name)
    return found


def test_code_cites_headings_of_notes_that_exist():
    assert without_anchor(ROOT) == []


def test_links_lead_to_headings():
    assert broken_anchors(ROOT) == []


def test_the_index_has_every_page_of_notes():
    assert unlisted_notes(ROOT) == []


@pytest.fixture
def notes(tmp_path):
    """A small tree with one page of notes and its index."""
    (tmp_path / "docs" / "notes").mkdir(parents=True)
    (tmp_path / "docs" / "notes" / "a-page.md").write_text("# What is it?\n\n## L2's cost\n\n```\n# code\n```\n")
    (tmp_path / "docs" / "notes" / "README.md").write_text("| What is it? | [a](a-page.md) |\n")
    (tmp_path / "src").mkdir()
    return tmp_path


@pytest.mark.parametrize(("cited", "right"), [("#l2s-cost", True), ("", False), ("#code", False), ("#gone", False)])
def test_a_wrong_citation_of_notes_is_found(notes, cited, right):
    # in two parts, since this file is read too
    citation = "/".join(("docs", "notes", f"a-page.md{cited}"))
    (notes / "src" / "a.py").write_text(f"# {citation}\n")
    (notes / "README.md").write_text(f"[a]({citation})\n")
    assert (without_anchor(notes) == []) == right
    assert (broken_anchors(notes) == []) == (right or not cited)


@pytest.mark.parametrize(("cited", "right"), [("", True), ("#a-part", True), ("#gone", False)])
def test_a_wrong_citation_of_another_page_is_found(notes, cited, right):
    (notes / "docs" / "other.md").write_text("# Other\n\n## A part\n")
    (notes / "src" / "a.py").write_text("# " + "/".join(("docs", f"other.md{cited}")) + "\n")
    (notes / "src" / "README.md").write_text("[a](../" + "/".join(("docs", f"other.md{cited})\n")))
    assert (without_anchor(notes) == []) == right
    assert (broken_anchors(notes) == []) == right
    (notes / "docs" / "other.md").unlink()
    assert without_anchor(notes) != []


@pytest.mark.parametrize("text", ["# Another question?\n", "no heading\n"])
def test_a_page_that_the_index_leaves_out_is_found(notes, text):
    assert unlisted_notes(notes) == []
    (notes / "docs" / "notes" / "b.md").write_text(text)
    assert unlisted_notes(notes) == ["b.md"]


def terms(page: str) -> list[str]:
    """The terms of the glossary's tables. Raises ValueError for a row without its four cells, two of them filled."""
    found = []
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith(("| term |", "| ---")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != 4 or not cells[0] or not cells[1]:
                raise ValueError(f"expected term, meaning, source and what it stands instead of; got {line}")
            found += [term.strip(" `") for term in re.split(r", (?![^(]*\))", cells[0])]
    return found


def test_the_glossary_has_each_term_once():
    found = terms((ROOT / "docs" / "glossary.md").read_text())
    assert len(found) > 50
    assert sorted(found) == sorted(set(found))


@pytest.mark.parametrize("row", ["| a | b |", "| a | b | c |", "| a | | c | d |", "| | b | c | d |"])
def test_a_row_of_the_glossary_that_says_too_little_is_found(row):
    with pytest.raises(ValueError, match="term, meaning, source"):
        terms(f"| term | meaning | from | instead of |\n| --- | --- | --- | --- |\n{row}\n")


def test_links_lead_somewhere():
    broken = []
    for path in pages(ROOT):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


# a file by its name, with folders or without, several by a pattern, and what is below the kernels or their models
FILE = re.compile(r"(?<![\w/.*}>-])((?:[\w-]+/)*[\w-]+\.(?:py|cuh?))\b(?!\()")
BELOW = re.compile(r"(?<![\w/.*}>-])((?:[\w-]+/)*(?:kernels|planner/models)(?:/[\w-]+)+(?:\.\w+)?)")
GLOB = re.compile(r"(?<![\w/.}>-])((?:[\w-]+/)*[\w-]*\*[\w-]*\.(?:py|cuh?))\b")
MODULE = re.compile(r"\bholdfast\.(?:kernels|planner)(?:\.(?!_)\w+)+")
# what the house must not have
CODE = ("src", "tests", "benchmarks", "examples", "packaging")
BANNED = {"utils.py"}


def prose(path: Path, text: str) -> str:
    """What a file says to a reader: a page, a Python file's docstrings and comments, a CUDA file."""
    if path.suffix != ".py":
        return text
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    said = [ast.get_docstring(node) or "" for node in nodes]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(said + [token.string for token in tokens if token.type == tokenize.COMMENT])


def is_module(root: Path, dotted: str) -> bool:
    """Whether a dotted name is that of a module, or of something that a module has."""
    place, parts = root / "src", dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    name = parts.pop(0) if parts and (place / f"{parts[0]}.py").exists() else "__init__"
    module = place / f"{name}.py"
    return module.exists() and (not parts or bool(re.search(rf"\b{parts[0]}\b", module.read_text())))


def gone_places(root: Path) -> list[str]:
    """Files and folders that pages, docstrings and comments name, and modules that any text names, which are gone.

    A place may be named from any folder on the way to it.
    """
    pages = [page for name in ("README.md", "CONTRIBUTING.md") if (page := root / name).exists()]
    code = [path for folder in CODE for path in sorted((root / folder).rglob("*.*"))]
    there = set()
    code = [path for path in code if path.suffix in {".py", ".cu", ".cuh", ".md"}]
    for path in code:
        parts = path.relative_to(root).parts
        there |= {"/".join(parts[first:last]) for last in range(1, len(parts) + 1) for first in range(last)}
    found = []
    for path in pages + sorted((root / "docs").rglob("*.md")) + code:
        text, own = path.read_text(), path.relative_to(root)
        names = {name for pattern in (FILE, BELOW) for name in pattern.findall(text)} - there - BANNED
        names |= {name for name in GLOB.findall(text) if not fnmatch.filter(there, name)}
        made = set(re.findall(r"^Create `([^`]+)`", text, re.M))
        if names:
            said = prose(path, text)
            found += [f"{own}: {name}" for name in sorted(names - made) if name in said]
        modules = {name for name in MODULE.findall(text) if f"src/{name.replace('.', '/')}.py" not in made}
        found += [f"{own}: {name}" for name in sorted(modules) if not is_module(root, name)]
    return found


def test_places_that_are_named_are_there():
    assert gone_places(ROOT) == []


@pytest.fixture
def named(tmp_path):
    """A small tree with a kernel, its model and its test, and a page and a script that names can be put into."""
    for place in ("src/holdfast/kernels/a/b.py", "src/holdfast/planner/models/a.py", "tests/kernels/a/test_b.py"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("run = 1\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`kernels/a/b.py`, `src/holdfast/kernels/a`, `tests/kernels/a/`, b.py, a/b.py, kernels/", []),
        ("planner/models/a.py, `holdfast/planner/models/<room>.py`, house.kernels.a.b.run", []),
        ("`a/*.py`, `test_*.py`, utils.py, x.cu_seqlens, fast.pyx, `kernels/a/b.run`", ["kernels/a/b.run"]),
        ("`kernels/common/b.py`", ["kernels/common/b.py"]),
        ("all of kernels/common/.", ["kernels/common"]),
        ("(`matrix/b.py`)", ["matrix/b.py"]),
        ("hopper_sweep.py.", ["hopper_sweep.py"]),
        ("many.cuh and `a/hopper_*.py`", ["a/hopper_*.py", "many.cuh"]),
        ("tests/planner/models/a.py", ["tests/planner/models/a.py"]),
        ("planner/models/matrix_hopper", ["planner/models/matrix_hopper"]),
        (
            "house.kernels.common.b and house.kernels.a.b.gone",
            ["house.kernels.a.b.gone", "house.kernels.common.b"],
        ),
    ],
)
def test_a_name_of_what_is_gone_is_found(named, text, wrong):
    # in other words, since this file is read too
    text, wrong = text.replace("house.", "holdfast."), [name.replace("house.", "holdfast.") for name in wrong]
    (named / "docs" / "page.md").write_text(text)
    (named / "benchmarks" / "script.py").write_text(f'"""Says: {text}"""\n# {text}\n')
    found = gone_places(named)
    assert sorted(found) == sorted(
        f"{file}: {name}" for file in ("benchmarks/script.py", "docs/page.md") for name in wrong
    )


def test_what_code_calls_a_file_is_its_own_affair_but_what_it_imports_is_not(named):
    gone = ".".join(("holdfast", "kernels", "gone"))
    (named / "benchmarks" / "script.py").write_text(f'x = open("gone.py"), "kernels/gone"\nimport {gone}\n')
    assert gone_places(named) == [f"benchmarks/script.py: {gone}"]
    (named / "docs" / "page.md").write_text("Create `src/holdfast/gone.py`:\n\nand `kernels/gone.py`")
    assert gone_places(named)[0] == "docs/page.md: kernels/gone.py"


def test_the_readmes_chart_is_of_its_table():
    spec = importlib.util.spec_from_file_location("chart", ROOT / "benchmarks/chart.py")
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| fastest peer that ran |") :].partition("\n\n")[0]
    assert len(chart.rows(readme)) == len(table.splitlines()) - 2 > 5
    assert chart.CHART.read_text() == chart.chart(readme), "python benchmarks/chart.py"
