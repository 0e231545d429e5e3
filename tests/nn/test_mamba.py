"""nn.Mamba: its paper's equations, a token and a channel at a time; checkpoints; mistakes."""

import math

import pytest
import torch

from holdfast import parallel
from holdfast.nn import Mamba, Mamba2
from parity import relative_error


def silu(x):
    return x / (1 + torch.exp(-x))


def written_out(m, x):
    """y [T, d_model] of x [T, d_model]."""
    I, N, rank, taps = m.inner, m.d_state, m.dt_rank, m.conv_width
    S, earlier, y = torch.zeros(I, N, dtype=x.dtype), [torch.zeros(I, dtype=x.dtype)] * (taps - 1), []
    for token in x:
        u, z = m.in_proj.weight[:I] @ token, m.in_proj.weight[I:] @ token
        earlier.append(u)
        mixed = m.conv1d.bias + sum(m.conv1d.weight[:, 0, j] * earlier[-taps + j] for j in range(taps))
        u = silu(mixed)
        dt, B, C = m.x_proj.weight[:rank] @ u, m.x_proj.weight[rank : rank + N] @ u, m.x_proj.weight[rank + N :] @ u
        dt = torch.log(1 + torch.exp(m.dt_proj.weight @ dt + m.dt_proj.bias))
        out = torch.zeros_like(u)
        for d in range(I):
            S[d] = torch.exp(-dt[d] * torch.exp(m.A_log[d])) * S[d] + dt[d] * B * u[d]
            out[d] = (C @ S[d] + m.D[d] * u[d]) * silu(z[d])
        y.append(m.out_proj.weight @ out)
    return torch.stack(y)


def make(*arguments, dtype=torch.float64, **options):
    torch.manual_seed(0)
    mixer = Mamba(*arguments, **options).to(dtype).requires_grad_(False)
    mixer.D.normal_()
    mixer.A_log.normal_()
    return mixer


@pytest.mark.parametrize("options", [{}, {"d_state": 3, "conv_width": 2}, {"dt_rank": 5, "expand": 1.5}])
def test_its_equations(options):
    mixer, x = make(8, **options), torch.randn(2, 11, 8, dtype=torch.float64)
    y, _ = mixer(x)
    assert relative_error(y, torch.stack([written_out(mixer, part) for part in x])) < 1e-12


def test_parameters_are_those_of_mamba_ssm():
    shapes = {name: tuple(x.shape) for name, x in Mamba(768).state_dict().items()}
    assert shapes == {
        "in_proj.weight": (3072, 768), "conv1d.weight": (1536, 1, 4), "conv1d.bias": (1536,),
        "x_proj.weight": (48 + 32, 1536), "dt_proj.weight": (1536, 48), "dt_proj.bias": (1536,),
        "A_log": (1536, 16), "D": (1536,), "out_proj.weight": (768, 1536),
    }  # fmt: skip


def test_starting_values():
    torch.manual_seed(0)
    mixer = Mamba(256)
    assert torch.equal(mixer.D, torch.ones(512))
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17).expand(512, 16))
    steps = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert steps.min() >= 1e-3 * 0.99
    assert steps.max() <= 0.1 * 1.01
    assert steps.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert mixer.dt_proj.weight.abs().max() <= mixer.dt_rank**-0.5
    assert mixer.dt_proj.weight.std().item() == pytest.approx(mixer.dt_rank**-0.5 / 3**0.5, rel=0.05)


def test_every_parameter_has_a_gradient():
    mixer = Mamba(8)
    y, state = mixer(torch.randn(2, 6, 8))
    (y.sum() + sum(s.sum() for s in state)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())


def test_no_state_unless_it_is_asked_for():
    mixer, x = make(8), torch.randn(2, 6, 8, dtype=torch.float64)
    y, state = mixer(x, output_final_state=False)
    assert state is None
    assert torch.equal(y, mixer(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_state": 0}, "d_state: expected a positive integer; got 0"),
        ({"conv_width": 0}, "conv_width: expected a positive integer; got 0"),
        ({"dt_rank": 0}, "dt_rank: expected a positive integer; got 0"),
        ({"expand": 1.3}, "expand: expected .* got 1.3 \\* 8"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(8, **options)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ((torch.zeros(2, 16, 16),), ValueError, r"state: expected 2 tensors \(S, tail\); got 1"),
        ((torch.zeros(2, 16, 4), torch.zeros(2, 3, 16)), ValueError, r"state\[0\]: expected S of shape \[2, 16, 16\]"),
        ((torch.zeros(2, 16, 16).half(), torch.zeros(2, 3, 16)), TypeError, r"state\[0\]: expected S in torch.float32"),
    ],
)
def test_wrong_states(state, error, message):
    mixer = Mamba(8)
    for run in (mixer, mixer.step):
        with pytest.raises(error, match=message):
            run(torch.randn(2, 1, 8), state)


def test_ranks_take_no_parts_of_its_sequences():
    """Beside mixers that do, it would go on from no state in silence."""
    model = torch.nn.Sequential(Mamba2(64, 2), Mamba(64))
    with pytest.raises(ValueError, match=r"module: expected no Mamba, .*; got one at '1'"):
        parallel.context_parallel(model, None)
    with pytest.raises(ValueError, match="op: expected an op of the matrix or diagonal family; got 'mamba1'"):
        parallel.summary("mamba1")
