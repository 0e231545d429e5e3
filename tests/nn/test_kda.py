"""KDA's module: flash-linear-attention's checkpoints, and the backends that its op has."""

import pytest
import torch

from holdfast.nn import KDA
from parity import relative_error

# KimiDeltaAttention(hidden_size=24, head_dim=6, num_heads=2, num_v_heads=4, expand_v=1.5, conv_size=3), as its
# constructor makes them: name -> shape
THEIRS = {
    "q_proj.weight": (12, 24), "k_proj.weight": (12, 24), "v_proj.weight": (36, 24),
    "q_conv1d.weight": (12, 1, 3), "k_conv1d.weight": (12, 1, 3), "v_conv1d.weight": (36, 1, 3),
    "f_proj.0.weight": (9, 24), "f_proj.1.weight": (24, 9), "b_proj.weight": (4, 24), "A_log": (4,), "dt_bias": (24,),
    "g_proj.0.weight": (9, 24), "g_proj.1.weight": (36, 9), "g_proj.1.bias": (36,),
    "o_norm.weight": (9,), "o_proj.weight": (24, 36),
}  # fmt: skip


def make(**options):
    torch.manual_seed(0)
    return KDA(24, 2, head_dim=6, num_v_heads=4, expand_v=1.5, conv_width=3, **options).double()


def test_a_checkpoint_of_flash_linear_attention_loads():
    mixer, x = make(), torch.randn(2, 9, 24, dtype=torch.float64)
    checkpoint = {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in THEIRS.items()}
    torch.nn.Sequential(mixer).load_state_dict({f"0.{name}": weight for name, weight in checkpoint.items()})
    for name, parameter in mixer.named_parameters():
        assert torch.equal(parameter.detach().flatten(), checkpoint[name].flatten()), name
    before = mixer(x)[0]
    other = make()
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other(x)[0], before)
    with pytest.raises(RuntimeError, match=r"size mismatch for q_conv1d\.weight"):
        mixer.load_state_dict(checkpoint | {"q_conv1d.weight": torch.zeros(12, 1, 4)})


def test_a_checkpoint_keeps_the_shape_that_it_was_given():
    checkpoint = {name: torch.zeros(shape) for name, shape in THEIRS.items()}
    make().load_state_dict(checkpoint)
    assert {name: tuple(x.shape) for name, x in checkpoint.items()} == THEIRS


def test_the_bound_holds():
    """A decay that is never below exp(lower_bound) keeps part of a state, however large the gate's inputs are."""
    mixer = make(lower_bound=-0.5)
    with torch.no_grad():
        mixer.b_proj.weight.zero_()
        mixer.dt_bias.fill_(1e6)
    S = torch.ones(1, 4, 6, 9, dtype=torch.float64)
    tails = mixer(torch.zeros(1, 1, 24, dtype=torch.float64))[1][1:]
    # keys of zero write and erase nothing
    _, (after, *_) = mixer(torch.zeros(1, 4, 24, dtype=torch.float64), (S, *tails))
    assert relative_error(after, torch.exp(torch.tensor(-0.5 * 4)) * S) <= 1e-7


def test_a_bound_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="lower_bound: expected a number; got str"):
        make(lower_bound="-5")
