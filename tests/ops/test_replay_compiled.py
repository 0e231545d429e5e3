"""Compiled layers: their graphs' calls of an op are replayed, as eager ones are."""

import pytest
import torch

from holdfast import nn as hnn
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay

# by the name of their ops
LAYERS = {"gla": lambda: hnn.GLA(16, num_heads=2), "lru": lambda: hnn.RGLRU(16)}


@pytest.mark.parametrize("name", LAYERS)
def test_both_passes_of_a_compiled_layer_are_replayed(name, monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    planning.forget()
    names, ran, run, record = {}, [], replay.Replay.__call__, replay._record

    def noting(self, tensors):
        ran.append(names[self])
        return run(self, tensors)

    def naming(run, name, arguments, named, tensors, cache, signature):
        outputs = record(run, name, arguments, named, tensors, cache, signature)
        names[cache[signature]] = name
        return outputs

    monkeypatch.setattr(replay.Replay, "__call__", noting)
    monkeypatch.setattr(replay, "_record", naming)
    torch.manual_seed(0)
    layer = LAYERS[name]()
    compiled = torch.compile(lambda x: layer(x)[0], backend="aot_eager", dynamic=False, fullgraph=True)
    try:
        for _ in range(4):
            ran.clear()
            x = torch.randn(1, 4, 16, requires_grad=True)
            y = compiled(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
        # each pass whole, not the ops within it
        assert ran == [f"{name}_layer_forward", f"{name}_layer_gradients"]
        with replay.disabled():
            right = layer(x)[0]
            (expected,) = torch.autograd.grad(right.sum(), x)
    finally:
        planning.forget()
        torch.compiler.reset()
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(dx, expected)
