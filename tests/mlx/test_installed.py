"""Whether mlx is here, that the front end stands on it alone, and what is said where it is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip(
    "mlx.core", reason="needs mlx, which pip install -e packaging/holdfast-mlx brings; holdfast.mlx is untested"
)

ROOT = Path(__file__).parents[2]
NO_TORCH = "import sys; sys.modules['torch'] = None; "


def python(*arguments, path):
    """Python with these folders and its standard library, and nothing that is installed."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(map(str, path)), "PATH": ""},
    )


def test_the_front_end_imports_no_torch():
    code = "import sys, holdfast.mlx; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}).returncode == 0


def test_the_self_test_without_mlx_says_so_in_a_line():
    done = python("-m", "holdfast.mlx.selftest", path=[ROOT / "src"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("holdfast.mlx needs mlx 0.32.1 or newer: pip install holdfast-mlx (")
    assert done.stderr.count("\n") == 1


def test_the_package_without_mlx_or_with_an_old_one(tmp_path):
    done = python("-c", "import holdfast.mlx", path=[ROOT / "src"])
    assert "ImportError: holdfast.mlx needs mlx 0.32.1 or newer" in done.stderr
    (tmp_path / "mlx").mkdir()
    for version, works in (("0.32.0", False), ("0.32.1", True), ("0.33.0.dev2026", True), ("1.0.0", True)):
        (tmp_path / "mlx" / "core.py").write_text(f"__version__ = {version!r}")
        code = "from holdfast.mlx.needs_mlx import LEAST"
        done = python("-c", code, path=[ROOT / "src", tmp_path])
        assert (f"(there is {version})" not in done.stderr) == works, done.stderr


def test_one_version():
    import holdfast
    import holdfast.mlx

    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert holdfast.__version__ == holdfast.mlx.__version__
    assert own["optional-dependencies"]["mlx"] == [f"holdfast-mlx=={holdfast.__version__}"]


@pytest.mark.slow
def test_the_distribution_runs_where_torch_cannot_be_imported(tmp_path):
    """The wheel, beside mlx alone; and holdfast's own wheel has no file of it."""
    import mlx.core

    wheels = tmp_path / "wheels"
    for source in (ROOT / "packaging" / "holdfast-mlx", ROOT):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, source],
            capture_output=True,
            text=True,
        )
        if "hatchling" in done.stderr and "No matching distribution" in done.stderr:
            pytest.skip("needs hatchling from a package index, to build the wheel")
        assert done.returncode == 0, done.stderr
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    for folder, name in ((alone, "holdfast_mlx-*.whl"), (whole, "holdfast-*.whl")):
        (wheel,) = wheels.glob(name)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel]
        assert subprocess.run(install, capture_output=True).returncode == 0
    installed = Path(mlx.core.__file__).parents[1]
    site = tmp_path / "site"
    site.mkdir()
    for path in installed.glob("mlx*"):
        (site / path.name).symlink_to(path)
    code = "import holdfast.mlx, holdfast.mlx.nn; print(holdfast.mlx.__file__)"
    done = python("-c", NO_TORCH + code, path=[alone, site])
    assert done.stdout.strip() == str(alone / "holdfast" / "mlx" / "__init__.py"), done.stderr
    done = python("-m", "holdfast.mlx.selftest", path=[alone, site])
    assert "are right" in done.stdout or "is right" in done.stdout, done.stderr
    assert "torch" not in {path.name for path in (*alone.iterdir(), *site.iterdir())}

    files = {str(path.relative_to(alone)) for path in alone.rglob("*") if path.is_file()}
    others = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    assert "holdfast/__init__.py" in others - files
    assert not {path for path in files & others if path.startswith("holdfast/")}
    sources = {path.name for path in (ROOT / "src" / "holdfast" / "mlx" / "metal").iterdir()}
    assert sources == {path.name for path in (alone / "holdfast" / "mlx" / "metal").iterdir()}
