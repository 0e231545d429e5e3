"""mLSTM's layer: gates in the one projection, and checkpoints that had them in one of their own."""

import torch

from holdfast.nn import MLSTM


def test_a_state_dict_with_the_gates_projection_apart_is_loaded():
    mixer, x = MLSTM(24, 3, expand_k=1.0).double(), torch.randn(2, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        mixer.gate_bias.uniform_(-1, 1)
    state = dict(mixer.state_dict())
    *widths, gates = mixer.widths
    weight = state.pop("in_proj.weight")
    apart = {"in_proj.weight": weight[: sum(widths)], "gate_proj.weight": weight[sum(widths) :][:gates]}
    apart["gate_proj.bias"] = state.pop("gate_bias")
    for given in (state | apart, mixer.state_dict()):
        other = MLSTM(24, 3, expand_k=1.0).double()
        other.load_state_dict(given)
        assert torch.equal(other(x)[0], mixer(x)[0])
    assert "gate_proj.bias" in apart


def test_rows_that_nothing_reads_have_no_gradient_and_gates_have_theirs():
    mixer, x = MLSTM(24, 3, expand_k=1.0), torch.randn(2, 9, 24)
    used = sum(mixer.widths)
    assert mixer.in_proj.out_features > used
    with torch.no_grad():
        mixer.gate_bias.fill_(0.5)
    mixer(x)[0].square().sum().backward()
    assert not mixer.in_proj.weight.grad[used:].any()
    assert mixer.in_proj.weight.grad[used - 6 : used].all(1).all()
    assert mixer.gate_bias.grad.all()
