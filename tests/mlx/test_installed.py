"""Whether mlx is here, and that the front end stands on it alone."""

import subprocess
import sys

import pytest

pytest.importorskip("mlx.core", reason="needs mlx, which pip install 'holdfast[mlx]' brings; holdfast.mlx is untested")


def test_the_front_end_imports_no_torch():
    code = "import sys, holdfast.mlx; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}).returncode == 0
