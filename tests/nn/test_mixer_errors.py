"""What a mixer says of sizes, inputs and states that do not fit."""

import pytest
import torch

from holdfast.nn import GLA, KDA, MLSTM, RWKV7, DeltaNet, GatedDeltaNet, GatedDeltaProduct, Mamba2, RetNet

EVERY = [GLA, RetNet, Mamba2, MLSTM, DeltaNet, GatedDeltaNet, GatedDeltaProduct, KDA, RWKV7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GLA(30, 4),
            "expand_k: expected expand_k \\* d_model to be a positive multiple of 4 heads; got .* = 15",
        ),
        (lambda: GLA(32, 4, expand_v=0.3), "expand_v: expected .* got 0.3 \\* 32 = 9.6"),
        (lambda: GLA(32, 4, expand_k=0), "expand_k: expected .* got 0 \\* 32 = 0"),
        (lambda: GLA(32, 4, gate_rank=0), "gate_rank: expected a positive integer; got 0"),
        (lambda: GLA(32, 4, gate_normalizer=-1.0), "gate_normalizer: expected a positive number; got -1.0"),
        (lambda: RetNet(30, 4), "expand_k: expected .* multiple of 4 heads; got 1.0 \\* 30 = 30"),
        (lambda: RetNet(12, 4), "expand_k: expected an even number of key channels a head.* got 3"),
        (lambda: RetNet(16, 4, rotary_base=0.0), "rotary_base: expected a positive number; got 0.0"),
        (lambda: Mamba2(48), "num_heads: expected to be given .* got None with expand \\* d_model = 96"),
        (lambda: Mamba2(48, 5), "num_heads: expected a divisor of expand \\* d_model = 96; got 5"),
        (lambda: Mamba2(48, 4, n_groups=3), "n_groups: expected a divisor of num_heads = 4; got 3"),
        (lambda: Mamba2(48, 4, d_state=0), "d_state: expected a positive integer; got 0"),
        (lambda: Mamba2(49, 4, expand=1.5), "expand: expected .* got 1.5 \\* 49 = 73.5"),
        (lambda: Mamba2(48, 4, conv_width=0), "conv_width: expected a positive integer; got 0"),
        (lambda: MLSTM(30, 4), "expand_k: expected .* got 0.5 \\* 30 = 15"),
        (lambda: MLSTM(32, 4, gating="tanh"), "gating: expected 'exp' or 'sigmoid'; got 'tanh'"),
        (lambda: MLSTM(32, 4, normalize=False), "normalize: expected True with gating='exp'"),
        (lambda: MLSTM(32, 4, gate_soft_cap=0.0), "gate_soft_cap: expected a positive number or None; got 0.0"),
        (lambda: DeltaNet(30, 4), "expand_k: expected .* got 1.0 \\* 30 = 30"),
        (lambda: DeltaNet(32, 4, conv_width=0), "conv_width: expected a positive integer; got 0"),
        (lambda: GatedDeltaNet(30, 4), "num_heads: expected a divisor of d_model = 30; got 4"),
        (lambda: GatedDeltaNet(32, 4, num_v_heads=6), "num_heads: expected a divisor of num_v_heads = 6; got 4"),
        (lambda: GatedDeltaNet(32, 4, head_dim=3, expand_v=1.5), "expand_v: expected .* got 1.5 \\* 3 = 4.5"),
        (lambda: GatedDeltaProduct(32, 4, num_householder=0), "num_householder: expected a positive integer; got 0"),
        (lambda: GatedDeltaProduct(32, 4, num_v_heads=6), "num_heads: expected a divisor of num_v_heads = 6; got 4"),
        (lambda: RWKV7(30, 4), "num_heads: expected a divisor of d_model = 30; got 4"),
        (lambda: RWKV7(32, 4, gate_rank=0), "gate_rank: expected a positive integer; got 0"),
        (lambda: RWKV7(32, 4, num_layers=0), "num_layers: expected a positive integer; got 0"),
        (lambda: KDA(30, 4), "num_heads: expected a divisor of d_model = 30; got 4"),
        (lambda: KDA(32, 4, num_v_heads=6), "num_heads: expected a divisor of num_v_heads = 6; got 4"),
        (lambda: KDA(32, 4, head_dim=3, expand_v=1.5), "expand_v: expected .* got 1.5 \\* 3 = 4.5"),
        (lambda: KDA(32, 4, conv_width=0), "conv_width: expected a positive integer; got 0"),
        (lambda: KDA(32, 4, lower_bound=0.0), "lower_bound: expected a number below 0, .* got 0.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("value", [0, -4, 2.0, True])
def test_d_model_and_num_heads_are_positive_integers(mixer, value):
    with pytest.raises(ValueError, match=f"(d_model|num_heads).*: expected .*{value}"):
        mixer(value, 1)
    with pytest.raises(ValueError, match=f"num_heads: expected a positive integer; got {value}"):
        mixer(32, value)


@pytest.fixture(params=EVERY)
def mixer(request):
    return request.param(32, 4)


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 5, 31), (2, 5, 4, 8)])
def test_x_of_the_wrong_shape(mixer, shape):
    with pytest.raises(
        ValueError, match=r"x: expected shape \[B, T, d_model=32\]; got \[" + ", ".join(map(str, shape))
    ):
        mixer(torch.zeros(shape))


def test_x_that_is_no_floating_point_tensor(mixer):
    with pytest.raises(TypeError, match="x: expected a tensor; got list"):
        mixer([[0.0]])
    with pytest.raises(TypeError, match=r"x: expected a floating-point dtype; got torch.int64"):
        mixer(torch.zeros(2, 5, 32, dtype=torch.int64))


def test_state_of_the_wrong_kind(mixer):
    x = torch.randn(2, 5, 32)
    _, state = mixer(x)
    with pytest.raises(TypeError, match=r"state: expected a tuple \(.*\); got Tensor"):
        mixer(x, state[0])
    with pytest.raises(ValueError, match=rf"state: expected {len(state)} tensors \(.*\); got {len(state) + 1}"):
        mixer(x, (*state, state[0]))
    with pytest.raises(TypeError, match=r"state\[0\]: expected . as a tensor; got NoneType"):
        mixer(x, (None, *state[1:]))
    with pytest.raises(ValueError, match=r"state\[0\]: expected . of shape \[2, 4, .*\]; got \[1, 4"):
        mixer(x, (state[0][:1], *state[1:]))
    last = len(state) - 1
    with pytest.raises(TypeError, match=rf"state\[{last}\]: expected \w+ in torch.\w+; got torch.bfloat16"):
        mixer(x, (*state[:-1], state[-1].bfloat16()))


def test_packing_needs_a_batch_of_one_and_integer_offsets(mixer):
    with pytest.raises(ValueError, match="cu_seqlens: expected packed inputs with B = 1; got B = 2"):
        mixer(torch.randn(2, 5, 32), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(TypeError, match=r"cu_seqlens: expected torch.int32 or torch.int64; got torch.float32"):
        mixer(torch.randn(1, 5, 32), cu_seqlens=torch.tensor([0.0, 5.0]))
