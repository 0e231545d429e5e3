"""flash-linear-attention's ops run by Holdfast, in a process of their own: transformers asks whether fla is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.integrations import fla
from holdfast.integrations.fla import arguments, registry
from holdfast.ops.explain import explain
from integrations.fla_calls import CALLS, example

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


@pytest.mark.slow
@pytest.mark.parametrize("name", [call.__name__ for call in CALLS])
def test_call(said, name):
    assert said[name] is None, said[name]


def test_arguments_are_those_of_holdfasts_ops():
    given, state = example(vector=True), torch.randn(2, 4, 8, 16)
    A_log, bias = torch.randn(4), torch.randn(4 * 16)
    found, is_turned = arguments.kda_arguments(
        **given, initial_state=state, state_v_first=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias,
        lower_bound=-5.0, output_final_state=True,
    )  # fmt: skip
    gate = {"A_log": A_log, "dt_bias": bias.view(4, 16), "lower_bound": -5.0}
    right = holdfast.kda(**given, initial_state=state.mT, output_final_state=True, **gate)
    assert is_turned
    assert all(map(torch.equal, holdfast.kda(**found), right))
    given = example()
    found, is_turned = arguments.gated_delta_rule_arguments(*given.values(), use_qk_l2norm_in_kernel=True)
    assert not is_turned
    assert torch.equal(holdfast.gated_delta_rule(**found)[0], holdfast.gated_delta_rule(**given, qk_l2norm=True)[0])
    with pytest.raises(ValueError, match="cp_context: Holdfast's op has none"):
        arguments.gated_delta_rule_arguments(*given.values(), cp_context=object())


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_what_plain_pytorch_would_run_on_a_gpu_stays_with_fla(op, monkeypatch):
    monkeypatch.setattr(
        registry, "explain", lambda op, sizes, dtype, _, *rest: explain(op, sizes, dtype, "h100", *rest)
    )
    for varlen in (False, True):
        registry._check_sizes.__wrapped__(op, (1, 1000, 8, 4, 128, 128), "bfloat16", True, varlen)
    with pytest.raises(ValueError, match=f"{op}: no kernel of Holdfast serves K = 512 and V = 128 in bfloat16"):
        registry._check_sizes.__wrapped__(op, (1, 1000, 8, 4, 512, 128), "bfloat16", True, False)


def test_without_fla():
    with pytest.raises(ImportError, match=r"expected flash-linear-attention of 0\.6 or newer"):
        fla.enable()
