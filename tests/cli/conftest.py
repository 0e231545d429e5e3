"""A small text and a way to run the holdfast command as users do, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.tiny import SOURCE, make_text


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """For every test below."""


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(make_text())
    return path


@pytest.fixture
def command():
    """The start of a command line, and the environment to run it in."""
    search = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [sys.executable, "-m", "holdfast.cli"], os.environ | {
        "PYTHONPATH": search,
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def holdfast(command):
    """Runs the command to its end."""
    line, environment = command

    def run(*options: object, **more: object) -> subprocess.CompletedProcess[str]:
        whole = [*line, *(str(option) for option in options)]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=120, **more)

    return run
