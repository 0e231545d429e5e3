"""What a module is made of before it learns: defaults, and the distributions that parameters are drawn from."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from holdfast import nn
from holdfast.nn.decay_init import initial_A_log, initial_dt_bias
from holdfast.nn.norm import GatedRMSNorm, HeadLayerNorm
from holdfast.nn.short_convolution import ShortConvolution

HEADS = {"num_heads": 4, "norm_eps": 1e-5}
LIKE_TORCH = {
    "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False, "device": None,
    "dtype": None, "num_heads": 1, "backend": None,
}  # fmt: skip
# a checkpoint is read into a module of the same sizes, so these stay
DEFAULTS = {
    nn.GLA: HEADS | {"expand_k": 0.5, "expand_v": 1.0, "gate_rank": 16, "gate_normalizer": 16.0, "backend": None},
    nn.RetNet: HEADS | {"expand_k": 1.0, "expand_v": 2.0, "rotary_base": 10000.0, "backend": None},
    nn.Mamba: {"d_state": 16, "expand": 2.0, "conv_width": 4, "dt_rank": None, "backend": None},
    nn.Mamba2: {
        "num_heads": None, "d_state": 128, "n_groups": 1, "expand": 2.0, "conv_width": 4, "norm_eps": 1e-5,
        "backend": None,
    },
    nn.MLSTM: {
        "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "gating": "exp", "normalize": True, "gate_soft_cap": 15.0,
        "input_gate_bias": -10.0, "norm_eps": 1e-6, "backend": None,
    },
    nn.SLSTM: {"num_heads": 4, "norm_eps": 1e-6, "backend": None},
    nn.DeltaNet: HEADS
    | {"expand_k": 1.0, "expand_v": 1.0, "conv_width": 4, "allow_neg_eigval": False, "backend": None},
    nn.GatedDeltaNet: HEADS
    | {
        "head_dim": None, "num_v_heads": None, "expand_v": 2.0, "conv_width": 4, "allow_neg_eigval": False,
        "backend": None,
    },
    nn.GatedDeltaProduct: HEADS
    | {
        "head_dim": None, "num_v_heads": None, "expand_v": 2.0, "num_householder": 2, "forget_gate": True,
        "conv_width": 4, "allow_neg_eigval": True, "backend": None,
    },
    nn.KDA: HEADS
    | {
        "head_dim": None, "num_v_heads": None, "expand_v": 1.0, "conv_width": 4, "lower_bound": None,
        "allow_neg_eigval": False, "backend": None,
    },
    nn.RWKV7: HEADS
    | {
        "decay_rank": None, "rate_rank": None, "value_rank": None, "gate_rank": None, "layer": 0, "num_layers": 1,
        "backend": None,
    },
    nn.RGLRU: {"num_heads": 1, "expand": 1.0, "decay_strength": 8.0, "backend": None},
    nn.RotLRU: {"num_heads": 1, "expand": 1.0, "decay_strength": 8.0, "max_phase": math.tau, "backend": None},
    nn.LSTM: LIKE_TORCH | {"proj_size": 0},
    nn.GRU: LIKE_TORCH,
    nn.RNN: LIKE_TORCH | {"nonlinearity": "tanh"},
    GatedRMSNorm: {"eps": 1e-5, "activation": "silu"},
    HeadLayerNorm: {"eps": 1e-6},
    ShortConvolution: {"width": 4, "bias": False},
}  # fmt: skip


@pytest.mark.parametrize("module", DEFAULTS, ids=lambda module: module.__name__)
def test_defaults(module):
    parameters = inspect.signature(module).parameters
    found = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    assert found == DEFAULTS[module]


def is_uniform(x, low, high):
    """Of many values: all within, and their quartiles where they belong."""
    x = x.detach().double().flatten()
    assert low - 1e-5 <= x.min() < low + (high - low) / 20
    assert high - (high - low) / 20 < x.max() <= high + 1e-5
    quartiles = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    expected = [low + part * (high - low) for part in (0.25, 0.5, 0.75)]
    assert quartiles.tolist() == pytest.approx(expected, abs=0.05 * (high - low))


def test_decay_rates_start_between_1_and_16_and_steps_log_uniform_from_a_thousandth_to_a_tenth():
    is_uniform(initial_A_log(4000).exp(), 1, 16)
    is_uniform(F.softplus(initial_dt_bias(4000).double()).log(), math.log(1e-3), math.log(0.1))


def test_both_delta_net_and_mamba_start_there():
    for mixer in (nn.Mamba2(16, 16, d_state=4), nn.GatedDeltaNet(64, 16), nn.GatedDeltaProduct(64, 16), nn.KDA(64, 16)):
        assert ((mixer.A_log >= 0) & (mixer.A_log <= math.log(16))).all()
        steps = F.softplus(mixer.dt_bias)
        assert ((steps >= 0.999e-3) & (steps <= 0.1001)).all()
    assert torch.equal(nn.Mamba2(16, 16, d_state=4).D, torch.ones(16))
    assert not nn.KDA(64, 16, lower_bound=-5.0).A_log.any()


def test_xlstm_forgets_little_and_writes_nothing_at_first():
    mixer = nn.MLSTM(16, 4)
    assert mixer.gate_bias.tolist() == [-10.0] * 4 + [3.0, 4.0, 5.0, 6.0]
    assert nn.MLSTM(16, 4, input_gate_bias=-2.0).gate_bias.tolist()[:4] == [-2.0] * 4
    mixer = nn.SLSTM(256, 4)
    assert torch.equal(mixer.b[1], torch.linspace(3, 6, 64).expand(4, 64))
    assert not mixer.b[[0, 2, 3]].any()
    is_uniform(mixer.R, -1 / 8, 1 / 8)


def test_the_short_convolution_starts_within_its_fan_in():
    conv = ShortConvolution(4000, 4, bias=True)
    is_uniform(conv.weight, -0.5, 0.5)
    is_uniform(conv.bias, -0.5, 0.5)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_start_within_hidden_size_and_recurrent_weights_within_a_head(layer):
    module = layer(64, 1024, num_heads=64)
    for name, weight in module.named_parameters():
        is_uniform(weight, *((-0.25, 0.25) if name.startswith("weight_hh") else (-1 / 32, 1 / 32)))


def test_norms_start_as_they_are():
    assert torch.equal(GatedRMSNorm(3, 5).weight, torch.ones(3, 5))
    assert torch.equal(HeadLayerNorm(3, 5).weight, torch.ones(3, 5))


def test_dropout_is_a_probability():
    for dropout in (0, 1, 0.5):
        assert nn.LSTM(2, 2, 2, dropout=dropout).dropout == dropout
    for dropout in (-0.1, 1.1, True, "0.5"):
        with pytest.raises(ValueError, match="dropout: expected a probability from 0 to 1"):
            nn.LSTM(2, 2, 2, dropout=dropout)
    with pytest.warns(UserWarning, match="dropout acts between layers, and num_layers is 1"):
        nn.LSTM(2, 2, dropout=0.5)
