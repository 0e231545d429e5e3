"""Mixers that take checkpoints of flash-linear-attention's layers, with its names and shapes of parameters."""

import pytest
import torch

from holdfast.nn import KDA, GatedDeltaProduct
from nn.test_mixer_equations import gated_delta_product, kimi_delta_attention
from parity import relative_error

# the layer's parameters as its constructor makes them, at hidden_size=24, head_dim=6, num_heads=2, num_v_heads=4,
# expand_v=1.5, conv_size=3: name -> shape
QKV = {
    "q_proj.weight": (12, 24), "k_proj.weight": (12, 24), "v_proj.weight": (36, 24),
    "q_conv1d.weight": (12, 1, 3), "k_conv1d.weight": (12, 1, 3), "v_conv1d.weight": (36, 1, 3),
}  # fmt: skip
OUT = {"o_norm.weight": (9,), "o_proj.weight": (24, 36)}
THEIRS = {
    # KimiDeltaAttention
    KDA: QKV
    | OUT
    | {
        "f_proj.0.weight": (9, 24), "f_proj.1.weight": (24, 9), "b_proj.weight": (4, 24), "A_log": (4,),
        "dt_bias": (24,), "g_proj.0.weight": (9, 24), "g_proj.1.weight": (36, 9), "g_proj.1.bias": (36,),
    },
    # GatedDeltaProduct(num_householder=2)
    GatedDeltaProduct: QKV
    | OUT
    | {
        "k_proj.weight": (24, 24), "v_proj.weight": (72, 24), "k_conv1d.weight": (24, 1, 3),
        "v_conv1d.weight": (72, 1, 3), "b_proj.weight": (8, 24), "a_proj.weight": (4, 24), "A_log": (4,),
        "dt_bias": (4,), "g_proj.weight": (36, 24),
    },
}  # fmt: skip
EQUATIONS = {KDA: kimi_delta_attention, GatedDeltaProduct: gated_delta_product}
every = pytest.mark.parametrize("kind", THEIRS, ids=lambda kind: kind.__name__)


def make(kind):
    return kind(24, 2, head_dim=6, num_v_heads=4, expand_v=1.5, conv_width=3).double()


@every
@torch.no_grad()
def test_a_checkpoint_loads(kind):
    mixer, x = make(kind), torch.randn(2, 9, 24, dtype=torch.float64)
    checkpoint = {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in THEIRS[kind].items()}
    torch.nn.Sequential(mixer).load_state_dict({f"0.{name}": weight for name, weight in checkpoint.items()})
    weights = {name.removesuffix(".weight"): weight for name, weight in checkpoint.items()}
    weights |= {name: weight[:, 0] for name, weight in weights.items() if "conv1d" in name}
    y, _ = mixer(x)
    assert relative_error(y, torch.stack([EQUATIONS[kind](mixer, each, weights) for each in x])) <= 1e-9
    other = make(kind)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other(x)[0], y)


@every
def test_a_checkpoint_that_lacks_a_part_is_refused(kind):
    checkpoint = {name: torch.zeros(shape) for name, shape in THEIRS[kind].items() if name != "v_proj.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"in_proj\.weight\""):
        make(kind).load_state_dict(checkpoint)


@every
def test_a_checkpoint_keeps_its_shapes(kind):
    checkpoint = {name: torch.zeros(shape) for name, shape in THEIRS[kind].items()}
    make(kind).load_state_dict(checkpoint)
    assert {name: tuple(x.shape) for name, x in checkpoint.items()} == THEIRS[kind]


@every
def test_a_convolution_of_another_width_is_refused(kind):
    checkpoint = {name: torch.zeros(shape) for name, shape in THEIRS[kind].items()}
    wider = {name: torch.zeros(*shape[:2], 4) for name, shape in THEIRS[kind].items() if "conv1d" in name}
    with pytest.raises(RuntimeError, match=r"size mismatch for conv\.weight"):
        make(kind).load_state_dict(checkpoint | wider)
