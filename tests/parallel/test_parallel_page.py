"""docs/parallel.md: its examples run, those over ranks also as the lines before them say, by torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_support.pool import run_script

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
OVER_RANKS = [code for code in EXAMPLES if "init_process_group" in code]


def check(printed: str) -> None:
    losses = [float(x) for x in re.findall(r"^step \d: loss (\S+)$", printed, re.M)]
    assert len(losses) == 3
    # of 256 bytes, each as likely, and then better: summed over the ranks
    assert 5.3 < losses[0] < 6.2
    assert losses[2] < losses[0]


over_ranks = pytest.mark.parametrize("code", OVER_RANKS, ids=["sequences", "heads"])


@over_ranks
def test_the_examples_over_ranks(tmp_path, code):
    (tmp_path / "example.py").write_text(code)
    check(run_script(2, tmp_path / "example.py"))


@pytest.mark.slow
@over_ranks
def test_the_examples_by_torchrun(tmp_path, code):
    (tmp_path / "example.py").write_text(code)
    ranks = "4" if "tensor_parallel" in code else "2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "example.py"]
    environment = os.environ | {"PYTHONPATH": str(PAGE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    check(done.stdout)
    if done.returncode and "terminate called without an active exception" in done.stderr:
        pytest.xfail("a rank aborts as it exits, after all its work, in 1 of 4 runs or fewer: not explained")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [code for code in EXAMPLES if code not in OVER_RANKS])
def test_the_other_examples_run_as_pasted(code):
    exec(compile(code, "docs/parallel.md", "exec"), {"__name__": "example"})
