"""flash-linear-attention's ops run by Holdfast, in a process of their own: transformers asks whether fla is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.integrations import fla
from integrations.fla_calls import CALLS

ROOT = Path(__file__).parents[2]
# as the Makefile installs it
PEERS = Path(sys.prefix) / "peers"


@pytest.fixture(scope="module")
def said():
    """What was wrong with each call."""
    if not (PEERS / "fla").exists():
        pytest.skip(f"needs flash-linear-attention: pip install --no-deps --target {PEERS} fla-core einops")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", PEERS)))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "integrations.fla_calls"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [call.__name__ for call in CALLS])
def test_call(said, name):
    assert said[name] is None, said[name]


def test_without_fla():
    with pytest.raises(ImportError, match=r"expected flash-linear-attention of 0\.6 or newer"):
        fla.enable()
