"""The mlx layers against the torch modules of the same names, with the same parameters; steps, states, training."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten, tree_unflatten

import holdfast.mlx.nn as layers
import holdfast.nn as modules
from mlx_support.oracle import relative_error

SIZES = {
    "RGLRU": {"d_model": 16, "num_heads": 2, "expand": 1.5},
    "RotLRU": {"d_model": 16, "num_heads": 2, "expand": 1.5},
    "GLA": {"d_model": 16, "num_heads": 2},
    "Mamba2": {"d_model": 16, "num_heads": 4, "d_state": 6, "n_groups": 2},
}
every_layer = pytest.mark.parametrize("name", SIZES)


def torch_twin(name, layer):
    """The torch module with the layer's parameters."""
    twin = getattr(modules, name)(**SIZES[name]).double()
    wide = {key: torch.tensor(np.array(x), dtype=torch.float64) for key, x in tree_flatten(layer.parameters())}
    if name == "Mamba2":
        wide["conv.weight"] = wide["conv.weight"].squeeze(-1)
        wide["norm.weight"] = wide.pop("norm_weight").reshape(twin.norm.weight.shape)
    twin.load_state_dict(wide)
    return twin


@every_layer
@pytest.mark.parametrize("path", ["metal", "mlx"])
def test_the_equation_is_that_of_the_torch_module(request, name, path):
    if path == "metal":
        request.getfixturevalue("metal")
    layer = getattr(layers, name)(**SIZES[name])
    # away from their starting values, where some parameters do nothing
    moved = [(k, x + 0.1 * mx.random.normal(x.shape)) for k, x in tree_flatten(layer.parameters())]
    layer.update(tree_unflatten(moved))
    twin = torch_twin(name, layer)
    x = mx.random.normal((2, 11, 16))
    weight = mx.random.normal(x.shape)

    (_, y), grads = nn.value_and_grad(layer, lambda x: ((weight * layer(x)[0]).sum(), layer(x)[0]))(x)
    expected, state = twin(torch.tensor(np.array(x), dtype=torch.float64))
    (torch.tensor(np.array(weight)) * expected).sum().backward()
    assert relative_error(y, expected.detach().numpy()) < 2e-5
    found = dict(tree_flatten(grads))
    if name == "GLA":
        found["in_proj.weight"] = mx.concatenate([found["in_proj.weight"], found["decay_down.weight"]])
    for key, parameter in twin.named_parameters():
        grad, theirs = found["norm_weight" if (name, key) == ("Mamba2", "norm.weight") else key], parameter.grad.numpy()
        if key == "in_proj.weight":
            # the torch module has rows beyond, which nothing reads
            theirs, beyond = np.split(theirs, [grad.shape[0]])
            assert not beyond.any()
        assert relative_error(grad.reshape(theirs.shape), theirs) < 5e-5, key
    ours = layer(x)[1][0]
    theirs = state[0].detach().numpy()
    assert relative_error(ours.swapaxes(-1, -2) if name == "Mamba2" else ours, theirs) < 2e-5


@every_layer
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_parts_and_steps_are_the_whole(name, dtype):
    layer = getattr(layers, name)(**SIZES[name])
    layer.set_dtype(dtype)
    x = mx.random.normal((2, 7, 16)).astype(dtype)
    whole, final = layer(x)
    assert whole.dtype == dtype
    first, state = layer(x[:, :4])
    middle, state = layer(x[:, 4:6], state)
    last, state = layer.step(x[:, 6], state)
    limit = 1e-5 if dtype == mx.float32 else 2e-2
    parts = mx.concatenate([first, middle, last[:, None]], axis=1)
    assert mx.allclose(parts, whole, rtol=limit, atol=limit)
    for x, y in zip(state, final, strict=True):
        assert x.dtype == mx.float32
        assert mx.allclose(x, y, rtol=limit, atol=limit)


@every_layer
def test_a_layer_learns(name):
    """To say what came two tokens ago."""
    layer = getattr(layers, name)(**SIZES[name])
    optimizer = optim.Adam(learning_rate=2e-2)
    # one key for all, so that the task is the same for each layer
    x = mx.random.normal((8, 12, 16), key=mx.random.key(3))
    target = mx.concatenate([mx.zeros((8, 2, 16)), x[:, :-2]], axis=1)
    step = nn.value_and_grad(layer, lambda: ((layer(x)[0] - target) ** 2).mean())
    losses = []
    for _ in range(30):
        loss, grads = step()
        optimizer.update(layer, grads)
        mx.eval(layer.parameters(), optimizer.state)
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0], losses


@every_layer
def test_bad_input(name):
    layer = getattr(layers, name)(**SIZES[name])
    with pytest.raises(ValueError, match=r"x: expected shape \[B, L, 16\]; got \[2, 3, 17\]"):
        layer(mx.zeros((2, 3, 17)))
    with pytest.raises(ValueError, match=r"x: expected shape \[B, 16\]; got \[2, 3, 16\]"):
        layer.step(mx.zeros((2, 3, 16)))
    with pytest.raises(TypeError, match="x: expected float32, bfloat16 or float16; got int32"):
        layer(mx.zeros((2, 3, 16), mx.int32))
    with pytest.raises(ValueError, match="state: expected a tuple of"):
        layer(mx.zeros((2, 3, 16)), mx.zeros((2, 16)))
    with pytest.raises(ValueError, match="initial_state: expected shape"):
        layer(mx.zeros((2, 3, 16)), layer(mx.zeros((1, 3, 16)))[1][:1] + ((None,) if name == "Mamba2" else ()))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("RGLRU", {"num_heads": 3}, "expand: expected expand \\* d_model to be a multiple of num_heads = 3"),
        ("RotLRU", {"num_heads": 16}, "expand: expected an even number of channels a head; got 1"),
        ("RotLRU", {"max_phase": 0.0}, "max_phase: expected a positive number"),
        ("GLA", {"expand_k": 0.3}, "expand_k: expected"),
        ("GLA", {"gate_rank": 0}, "gate_rank: expected at least 1"),
        ("Mamba2", {}, "num_heads: expected to be given where expand \\* d_model is no multiple of 64; got None"),
        ("Mamba2", {"num_heads": 4, "n_groups": 3}, "n_groups: expected a divisor of num_heads = 4; got 3"),
    ],
)
def test_bad_sizes(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        getattr(layers, name)(16, **sizes)
