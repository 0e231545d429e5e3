"""The Kernel Hub's tree, loaded from a folder by the hub's own library, beside the package that is installed."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, ROOT / "packaging/hub/build.py", folder], check=True)
    return folder


@pytest.mark.slow
def test_nothing_of_it_names_the_installed_package(tree):
    found = list((tree / "build").rglob("*.py"))
    assert len(found) > 200
    for path in found:
        imports = [line for line in path.read_text().splitlines() if line.strip().startswith(("import ", "from "))]
        assert not [line for line in imports if "holdfast" in line], path


@pytest.mark.slow
@pytest.mark.parametrize("check", ["ops_and_modules", "layers"])
def test_it_is_loaded_and_right(tree, check):
    """In a process whose path has no tests: their folder for kernels has the name of the hub's library."""
    try:
        version("kernels")
    except PackageNotFoundError:
        pytest.skip("needs kernels, which pip install 'holdfast[dev]' brings")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-P", ROOT / "tests/hub_loaded.py", tree, check]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{check} right\n"
