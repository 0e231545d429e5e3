"""What a type checker makes of calls: it finds planted mistakes, and nothing in calls that are right."""

import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
RIGHT = """\
import torch
import holdfast
from holdfast import nn
from holdfast.nn import GatedDeltaNet

q = torch.randn(1, 8, 2, 16)
g = torch.zeros(1, 8, 2)
o, state = holdfast.simple_gla(q, q, q, g, output_final_state=True)
o2, _ = holdfast.gated_delta_rule(q, q, q, g, g, initial_state=state, backend="chunked")
h, _ = holdfast.rglru(torch.rand(1, 8, 16), torch.randn(1, 8, 16))
z, _ = holdfast.causal_conv1d(torch.randn(1, 8, 4), torch.randn(4, 4), activation="silu", output_final_state=True)
y = holdfast.gated_rms_norm(o, q, torch.ones(16), eps=1e-5)
layer = GatedDeltaNet(64, num_heads=2)
x, carried = layer(torch.randn(1, 8, 64))
token = layer.step(torch.randn(1, 1, 64), carried)
print(o2.dtype, h, y.shape, z, token, nn.RetNet(64), holdfast.parallel, holdfast.planner, holdfast.RECURRENCES["gla"])
"""
# one mistake a line
WRONG = """\
holdfast.simple_gla(q, q, q, g, output_final_states=True)
holdfast.simple_gla(q, q)
holdfast.gla(q, q, q, "g")
holdfast.simple_gla(q, q, q, g).shape
holdfast.gated_delta_rule(q, q, q, g, g, scale="big")
holdfast.mlstm(q, q, q, g, g, gating=1)
holdfast.causal_conv1d(q, q, activation=True)
GatedDeltaNet("64")
GatedDeltaNet(64, heads=2)
nn.RetNet(64, backend=3)
a, b, c = holdfast.gla(q, q, q, q)
holdfast.simple_glaa(q, q, q, g)
nn.GLA(64).step(q)
holdfast.retnet(q, q, q, initial_state=[1, 2])
""".splitlines()


@pytest.mark.slow
def test_a_checker_finds_mistakes_and_nothing_else(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(SOURCE))
    script = tmp_path / "script.py"
    script.write_text("\n".join([RIGHT, *WRONG]))
    said, complaint, _ = api.run(["--python-executable", sys.executable, "--cache-dir", str(tmp_path), str(script)])
    assert not complaint
    found = {int(n) for n in re.findall(r"script\.py:(\d+): error", said)}
    first = RIGHT.count("\n") + 2
    assert found == set(range(first, first + len(WRONG))), said


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "holdfast" / "py.typed").exists()
