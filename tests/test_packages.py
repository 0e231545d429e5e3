"""What is handed out: the wheel and the sdist, installed away from the checkout, and what describes them."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the sdist and of the wheel that is built from it."""
    pytest.importorskip("build", reason="needs build, which pip install 'holdfast[dev]' brings")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_they_hold_what_runs_and_no_more(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"holdfast-{holdfast.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 10e6
    assert sdist.stat().st_size < 10e6
    names = set(zipfile.ZipFile(wheel).namelist())
    here = [path.relative_to(ROOT / "src") for path in (ROOT / "src/holdfast").rglob("*") if path.is_file()]
    # holdfast-mlx brings mlx
    ours = {str(path) for path in here if path.parts[1] != "mlx" and "__pycache__" not in path.parts}
    assert ours == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith(".cu") for name in ours)
    assert "holdfast/py.typed" in ours
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *(f"src/{name}" for name in ours)} <= held


@pytest.mark.slow
def test_the_wheel_runs_in_a_venv_of_its_own(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
    (own,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # torch and the like from here, behind what is installed there; a .pth file, by which this checkout is there, is not
    # read of a folder that is added so
    (own / "others.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    quiet = [python, "-W", "error", "-c", "import holdfast; print(holdfast.__file__)"]
    done = subprocess.run(quiet, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(own))
    code = (
        "import torch, holdfast; q = torch.ones(1, 3, 1, 2); print(holdfast.linear_attention(q, q, q)[0].sum().item())"
    )
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert float(done.stdout) == pytest.approx(2 * 2**0.5 * (1 + 2 + 3)), done.stderr
    done = subprocess.run(
        [tmp_path / "venv/bin/holdfast", "explain", "gla"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_other_descriptions_say_the_same():
    cited = (ROOT / "CITATION.cff").read_text()
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text()
    assert f"\nversion: {holdfast.__version__}\n" in cited
    assert f'version: "{holdfast.__version__}"' in recipe
    needed = {name.replace("torch", "pytorch") for name in PROJECT["dependencies"]}
    for name in needed | {f"python {PROJECT['requires-python']}"}:
        assert f"    - {name.replace('>', ' >') if ' ' not in name else name}\n" in recipe, name
    assert f"summary: {PROJECT['description'].replace(': t', '; t')}" in recipe
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f'python: ["{least}", ' in (ROOT / ".github/workflows/checks.yml").read_text()


def test_the_page_of_versions_has_those_of_the_constraints():
    page = (ROOT / "docs/versions.md").read_text()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            (row,) = (row for row in page.splitlines() if row.lower().startswith(f"| {name} "))
            assert version in row, name
