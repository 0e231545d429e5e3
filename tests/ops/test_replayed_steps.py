"""What is left in Python of a layer's op when it is replayed: launches, and the PyTorch operations that compute."""

import pytest
import torch

from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay
from holdfast.kernels.runtime.replay.recording import Launch, Operation
from holdfast.ops import delta_layer, gla_layer, kda_layer, lru_layer, mlstm_layer, retention_layer
from sanitize.dry import pretending


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def full(*shape):
    return torch.zeros(shape, dtype=torch.float32)


def zeros(outputs, count):
    return [torch.zeros_like(x) for x in outputs[:count]]


def gla(grads):
    tensors = half(1, 16, 400), full(64, 16), full(64), full(128), None
    out = gla_layer._op(*tensors, 1, 16.0, 1e-5, None, True, "")
    dy, dstate = zeros(out, 2)
    gla_layer._layer_backward(dy, dstate if grads else None, *out[2:], *tensors, 1, 16.0, 1e-5, None, "")


def retention(grads):
    tensors = half(1, 16, 512), full(128), None, None
    out = retention_layer._op(*tensors, 1, 1e4, 1e-5, None, True, "", 0)
    dy, dstate = zeros(out, 2)
    given = dy, dstate if grads else None, *tensors, *out[2:], 1e4, 1e-5, None, ""
    retention_layer.retention_layer_backward(*given)


def mlstm(grads):
    tensors, options = (half(1, 16, 528), full(2), full(1, 128), None, None), (128, True, True, 15.0, 1e-6, None)
    out = mlstm_layer._op(*tensors, *options, True, "")
    dy, *dstate = zeros(out, 3)
    given = dy, *(dstate if grads else (None, None)), *tensors, *out[3:], *options, ""
    mlstm_layer.mlstm_layer_backward(*given)


def rglru(grads):
    tensors = half(1, 16, 256), full(1, 128, 256), full(1, 256), full(128), None, None
    out = lru_layer._op(*tensors, 8.0, None, True, "")
    dy, dstate = zeros(out, 2)
    product, a, write, _, h, entries = out[2:]
    given = dy, dstate if grads else None, *tensors, product, a, write, None, h, entries, 8.0, None, ""
    lru_layer.lru_layer_backward(*given)


def gated_delta_net(grads):
    tensors = half(1, 16, 528), full(384, 4), full(128), full(1), full(1), None, None
    out = delta_layer._op(*tensors, 1, 128, False, 1e-5, None, True, "")
    dy, *dstate = zeros(out, 3)
    given = dy, *(dstate if grads else (None, None)), *tensors, *out[3:], 1, 128, False, 1e-5, None, ""
    delta_layer.delta_layer_backward(*given)


def kda(grads):
    weights = full(384, 4), full(128), full(128, 128), full(128, 128), full(128), full(1), full(1, 128)
    tensors, options = (half(1, 16, 656), *weights, None, None), (1, 128, None, False, 1e-5, None)
    out = kda_layer._op(*tensors, *options, True, "")
    dy, *dstate = zeros(out, 3)
    given = dy, *(dstate if grads else (None, None)), *tensors, *out[3:], *options, ""
    kda_layer._layer_backward(*given)


def recorded():
    """Of the replays that ran launches and operations, forward and backward."""
    found = {id(x): x for known in planning._CACHES for x in known.values() if isinstance(x, replay.Replay) and x.guard}
    kinds = [[type(step) for step, _ in x.steps] for x in found.values()]
    return sorted((x.count(Launch), x.count(Operation)) for x in kinds)


# launches and operations of forward and of backward; and of backward with gradients of the states, which compiled
# blocks always hand over
CASES = [
    (gla, [(3, 2), (6, 4)], [(3, 2), (6, 4)]),
    (retention, [(3, 5), (5, 0)], [(3, 5), (5, 0)]),
    (mlstm, [(5, 1), (8, 4)], [(5, 1), (8, 8)]),
    (rglru, [(3, 2), (4, 4)], [(3, 2), (4, 4)]),
    # forward what Hopper's kernels would keep, which others leave 0
    (gated_delta_net, [(5, 1), (9, 2)], [(5, 1), (9, 2)]),
    (kda, [(7, 5), (11, 11)], [(7, 5), (11, 11)]),
]


@pytest.mark.parametrize(("layer", "plain", "with_states"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_layers_replay_has_no_more_steps(layer, plain, with_states, monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    with pretending(), torch.no_grad():
        replay.allow(torch.device("cpu"))
        found = []
        for grads in (False, True):
            planning.forget()
            for _ in range(4):
                layer(grads)
            found.append(recorded())
    assert found == [plain, with_states]
