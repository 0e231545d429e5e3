"""docs/adding-an-mlx-scan.md, followed to the letter on a copy of the package, its kernels run on the CPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from followed_page import follow
from mlx_support import cpu

ROOT = Path(__file__).parents[2]

TRIAL = """
import mlx.core as mx, torch
from mlx_support import cpu, oracle
from holdfast.mlx import chassis, hgrn_scan_with_state

def exact(f, x, h):
    ys = []
    for t in range(x.shape[1]):
        h = f[:, t] * h + (1 - f[:, t]) * x[:, t]
        ys.append(h)
    return torch.stack(ys, 1), h

metal = cpu.Metal(seed=1)
mx.fast.metal_kernel = metal.metal_kernel
chassis.metal_missing = lambda: None
f, x, h = mx.random.uniform(-0.2, 1, (2, 21, 37)), mx.random.normal((2, 21, 37)), mx.random.normal((2, 37))
weights = [mx.random.normal(x.shape), mx.random.normal(h.shape)]
expected = oracle.exact(exact, [f, x], h, weights)
for backend in ("metal", "mlx"):
    scan = lambda *xs, initial_state: hgrn_scan_with_state(*xs, initial_state=initial_state, backend=backend)
    oracle.assert_close(oracle.ours(scan, [f, x], h, weights), expected, 2e-5)
assert [launch.kernel for launch in metal.launches] == ["hgrn_forward", "hgrn_backward"]
print("right")
"""


@pytest.mark.skipif(cpu.COMPILER is None, reason="needs g++ or clang++ to run Metal kernels on the CPU")
def test_the_page_adds_a_scan(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    follow((ROOT / "docs" / "adding-an-mlx-scan.md").read_text(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", TRIAL],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path / 'src'}:{ROOT / 'tests'}", "PATH": str(Path(cpu.COMPILER).parent)},
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]
