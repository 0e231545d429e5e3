"""RWKV-7's time mix: the paper's equations, values of the first layer, fla's checkpoints, and what it starts from."""

import math

import pytest
import torch

from holdfast.nn import RWKV7
from parity import relative_error

WIDTH, HEADS, LENGTH = 12, 2, 70
RANKS = {"decay_rank": 3, "rate_rank": 4, "value_rank": 5, "gate_rank": 6}
# RWKV7Attention's parameters in flash-linear-attention, at these sizes and layer_idx=1: name -> shape
THEIRS = {
    **{f"x_{part}": (1, 1, WIDTH) for part in "rwkvag"},
    "k_k": (WIDTH,), "k_a": (WIDTH,), "r_k": (HEADS, WIDTH // HEADS),
    **{f"{part}_proj.weight": (WIDTH, WIDTH) for part in "rkvo"},
    "w_lora.lora.0.weight": (3, WIDTH), "w_lora.lora.2.weight": (WIDTH, 3), "w_lora.lora.2.bias": (WIDTH,),
    "a_lora.lora.0.weight": (4, WIDTH), "a_lora.lora.2.weight": (WIDTH, 4), "a_lora.lora.2.bias": (WIDTH,),
    "v_lora.lora.0.weight": (5, WIDTH), "v_lora.lora.2.weight": (WIDTH, 5), "v_lora.lora.2.bias": (WIDTH,),
    "g_lora.lora.0.weight": (6, WIDTH), "g_lora.lora.2.weight": (WIDTH, 6),
    "g_norm.weight": (WIDTH,), "g_norm.bias": (WIDTH,),
}  # fmt: skip
every_layer = pytest.mark.parametrize("layer", [0, 1])


def checkpoint(layer):
    torch.manual_seed(3)
    found = {name: torch.randn(shape, dtype=torch.float64) / 2 for name, shape in THEIRS.items()}
    return {name: weight for name, weight in found.items() if layer or not name.startswith("v_lora")}


def make(layer=1, weights=None):
    mixer = RWKV7(WIDTH, HEADS, **RANKS, layer=layer, num_layers=3).double()
    mixer.load_state_dict(checkpoint(layer) if weights is None else weights)
    return mixer


def equations(x, w, first=None):
    """One sequence x [T, d], a head and a token at a time; w: weights by fla's names. first: values of layer 0."""

    def low(x, name, between):
        inner = between(x @ w[f"{name}_lora.lora.0.weight"].T) @ w[f"{name}_lora.lora.2.weight"].T
        return inner + w.get(f"{name}_lora.lora.2.bias", 0.0)

    def same(x):
        return x

    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    mixed = {part: x + w[f"x_{part}"][0, 0] * (before - x) for part in "rwkvag"}
    r, k, v = (mixed[part] @ w[f"{part}_proj.weight"].T for part in "rkv")
    if first is not None:
        share = torch.sigmoid(low(mixed["v"], "v", same))
        v = (1 - share) * v + share * first
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(low(mixed["w"], "w", torch.tanh)))
    a, gate = torch.sigmoid(low(mixed["a"], "a", same)), low(mixed["g"], "g", torch.sigmoid)
    removed, k = k * w["k_k"], k * (1 - w["k_a"] + w["k_a"] * a)
    heads, D = [], WIDTH // HEADS
    for head in range(HEADS):
        part = slice(head * D, (head + 1) * D)
        S, ys = torch.zeros(D, D, dtype=x.dtype), []
        for t in range(len(x)):
            c = removed[t, part] / removed[t, part].norm()
            S = (torch.diag(decay[t, part]) - torch.outer(a[t, part] * c, c)) @ S + torch.outer(k[t, part], v[t, part])
            o = S.T @ r[t, part]
            o = (o - o.mean()) / torch.sqrt(o.var(correction=0) + 1e-5 * D)
            o = o * w["g_norm.weight"][part] + w["g_norm.bias"][part]
            ys.append(o + (r[t, part] * w["r_k"][head] * k[t, part]).sum() * v[t, part])
        heads.append(torch.stack(ys))
    return (torch.cat(heads, 1) * gate) @ w["o_proj.weight"].T


def example(B=2, T=LENGTH):
    torch.manual_seed(4)
    return torch.randn(2, B, T, WIDTH, dtype=torch.float64)


@every_layer
@torch.no_grad()
def test_equals_the_papers_equations_with_flas_weights(layer):
    x, first = example()
    first = first if layer else None
    y, _ = make(layer)(x, first_values=first)
    right = [equations(each, checkpoint(layer), None if first is None else first[n]) for n, each in enumerate(x)]
    assert relative_error(y, torch.stack(right)) <= 1e-9


@torch.no_grad()
def test_values_are_the_first_layers_projection():
    x, _ = example()
    w, mixer = checkpoint(0), make(0)
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    right = (x + w["x_v"] * (before - x)) @ w["v_proj.weight"].T
    assert relative_error(mixer.values(x), right) <= 1e-12
    _, state = mixer(x[:, :30])
    assert relative_error(mixer.values(x[:, 30:], state), right[:, 30:]) <= 1e-12


@torch.no_grad()
def test_steps_of_a_later_layer_equal_the_whole():
    (x, first), mixer = example(), make()
    whole, final = mixer(x, first_values=first)
    y, state = mixer(x[:, :60], first_values=first[:, :60])
    places = [s.data_ptr() for s in state]
    outputs = [y, *(mixer.step(x[:, t : t + 1], state, first[:, t : t + 1]) for t in range(60, LENGTH))]
    assert relative_error(torch.cat(outputs, 1), whole) <= 1e-9
    assert [s.data_ptr() for s in state] == places
    assert all(relative_error(s, right) <= 1e-9 for s, right in zip(state, final, strict=True))


@torch.no_grad()
def test_packed_sequences_of_a_later_layer_equal_each_by_itself():
    (x, first), mixer = example(B=1), make()
    y, state = mixer(x, cu_seqlens=torch.tensor([0, 3, 3, LENGTH]), first_values=first)
    for n, part in ((0, slice(0, 3)), (2, slice(3, LENGTH))):
        alone, last = mixer(x[:, part], first_values=first[:, part])
        assert relative_error(y[:, part], alone) <= 1e-9
        assert all(relative_error(s[n], right[0]) <= 1e-9 for s, right in zip(state, last, strict=True))


def test_gradients_reach_the_first_layers_values_and_every_weight():
    (x, first), mixer = example(), make()
    y, (S, _) = mixer(x, first_values=first.requires_grad_())
    (y.square().sum() + S.square().sum()).backward()
    assert first.grad.any()
    assert [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_checkpoint_that_lacks_a_part_is_refused():
    weights = checkpoint(1)
    del weights["x_w"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "mix"'):
        make(weights=weights)
    mixer = make()
    make(weights=mixer.state_dict())
    assert not [name for name in mixer.state_dict() if name.startswith("shift")]


def test_what_it_starts_from():
    """At the ends of the channels, where the formulas of fla's layer are read off; the first and the last layer."""
    first, last = RWKV7(128, 2), RWKV7(128, 2, layer=11, num_layers=12)
    powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])
    torch.testing.assert_close(first.mix[:, 64], 1 - 0.5**powers)
    torch.testing.assert_close(last.mix[:, 64], 1 - 0.5 ** (powers / 12))
    bias = first.decay.up.bias
    # each head has its fastest decay at its last channel
    assert bias[[0, 63, 64, 127]].tolist() == pytest.approx([-8, -3 + 6 * 63 / 127, -8 + 6 * 64 / 127, 3], abs=1e-5)
    assert last.decay.up.bias[64].item() == pytest.approx(-8 + 6 * (64 / 127) ** 2, abs=1e-5)
    assert first.rate.up.bias[[0, 127]].tolist() == pytest.approx([-0.69, 0.31], abs=1e-5)
    assert last.residual.up.bias[[0, 127]].tolist() == pytest.approx([0.93, 0.53], abs=1e-5)
    assert first.k_k[[0, 127]].tolist() == pytest.approx([0.76, 0.66], abs=1e-5)
    assert first.k_a.unique().tolist() == pytest.approx([1.02])
    assert first.r_k.unique().tolist() == pytest.approx([-0.04])
    assert RWKV7(128, 2, layer=2, num_layers=12).norm.weight.unique().tolist() == pytest.approx([0.25**0.7])
    assert (first.norm.eps, first.residual) == (64e-5, None)
    assert not first.norm_bias.any()


def test_ranks_grow_with_the_width():
    def ranks(mixer):
        return [low.down.out_features for low in (mixer.decay, mixer.rate, mixer.residual, mixer.gate)]

    assert ranks(RWKV7(768, 12, layer=1, num_layers=12)) == [64, 64, 32, 128]
    assert ranks(RWKV7(2560, 40, layer=1, num_layers=32)) == [128, 128, 96, 256]
    assert ranks(RWKV7(64, 4, layer=1, num_layers=2)) == [32, 32, 32, 32]


@pytest.mark.parametrize(
    ("layer", "first", "message"),
    [
        (0, torch.zeros(1, 3, WIDTH), r"expected None, as layer 0 has values of its own; got \[1, 3, 12\]"),
        (1, None, r"expected what layer 0's values returned, \[1, 3, 12\], in layer 1; got None"),
        (1, torch.zeros(1, 2, WIDTH), r"expected .* got \[1, 2, 12\]"),
    ],
)
def test_first_values_that_do_not_fit(layer, first, message):
    with pytest.raises(ValueError, match=f"first_values: {message}"):
        make(layer)(torch.zeros(1, 3, WIDTH, dtype=torch.float64), first_values=first)


@pytest.mark.parametrize(("layer", "layers"), [(-1, 2), (2, 2), (0.0, 2), (1, 1)])
def test_a_layer_is_one_of_all(layer, layers):
    with pytest.raises(ValueError, match=f"layer: expected an integer from 0 to num_layers - 1 = .*; got {layer}"):
        RWKV7(WIDTH, HEADS, layer=layer, num_layers=layers)
