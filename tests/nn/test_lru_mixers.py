"""RGLRU and RotLRU against their papers' equations, and their starting values and errors."""

import math

import pytest
import torch

from holdfast.kernels.lru.torch.backend import input_scale, log_magnitude
from holdfast.nn import RGLRU, RotLRU
from holdfast.nn.lru_gates import initial_rate
from parity import relative_error


def gates(m, u):
    """The gates of each step and head, [T, heads, gates of a head]."""
    heads = u.unflatten(-1, (m.gates.heads, -1))
    rows = [[heads[t, h] @ m.gates.weight[h] + m.gates.bias[h] for h in range(m.gates.heads)] for t in range(len(u))]
    return torch.stack([torch.stack(row) for row in rows])


def softplus(x):
    return torch.log(1 + torch.exp(x))


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def rglru(m, x):
    u, z = (x @ m.in_proj.weight.T).split(m.width, -1)
    r, i = (torch.sigmoid(gate).flatten(1) for gate in gates(m, u).chunk(2, -1))
    a = torch.exp(-8 * softplus(m.rate) * r)
    h, ys = torch.zeros(m.width, dtype=x.dtype), []
    for t in range(len(x)):
        h = a[t] * h + torch.sqrt(1 - a[t] ** 2) * i[t] * u[t]
        ys.append(h * gelu(z[t]))
    return torch.stack(ys) @ m.out_proj.weight.T, h


def rotlru(m, x):
    u, z = (x @ m.in_proj.weight.T).split(m.width, -1)
    pairs = m.phase.numel() // m.gates.heads
    r, i, turn = (gate.flatten(1) for gate in gates(m, u).split([pairs, 2 * pairs, pairs], -1))
    a = torch.exp(-8 * softplus(m.rate) * torch.sigmoid(r))
    gate = torch.polar(a, m.phase + turn)
    write = torch.view_as_complex((torch.sigmoid(i) * u).unflatten(-1, (-1, 2)).contiguous())
    h, ys = torch.zeros(m.width // 2, dtype=gate.dtype), []
    for t in range(len(x)):
        h = gate[t] * h + torch.sqrt(1 - a[t] ** 2) * write[t]
        ys.append(torch.view_as_real(h).flatten() * gelu(z[t]))
    return torch.stack(ys) @ m.out_proj.weight.T, torch.view_as_real(h).flatten()


@pytest.mark.parametrize(("mixer", "equation"), [(RGLRU, rglru), (RotLRU, rotlru)])
@pytest.mark.parametrize("options", [{}, {"num_heads": 3}, {"num_heads": 2, "expand": 1.5}])
def test_a_mixer_is_its_equation(mixer, equation, options):
    m = mixer(24, **options).double()
    with torch.no_grad():
        for p in m.parameters():
            p += 0.1 * torch.randn_like(p)
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    y, (h,) = m(x)
    expected, state = equation(m, x[0])
    assert relative_error(y[0], expected) <= 1e-12
    assert relative_error(h[0], state) <= 1e-12


def test_the_decay_starts_between_its_bounds():
    rate = initial_rate(10_000, 8.0).double()
    a = log_magnitude(torch.full((10_000,), torch.inf, dtype=torch.float64), rate, 8.0).exp()
    assert 0.9 - 1e-4 <= a.min() < 0.901
    assert 0.998 < a.max() <= 0.999 + 1e-4
    assert abs(a.mean() - 0.9495) < 0.002


def test_the_scale_of_the_input_is_exact_near_one():
    log_a = -torch.logspace(-12, 1, 50, dtype=torch.float64)
    exact = torch.sqrt(-torch.expm1(2 * log_a))
    assert relative_error(input_scale(log_a.float()).double(), exact) <= 1e-7
    assert ((input_scale(log_a.float()).double() - exact).abs() <= 1e-6 * exact).all()


def test_a_gate_of_one_has_a_finite_gradient():
    log_a = torch.zeros(3, requires_grad=True)
    input_scale(log_a).sum().backward()
    assert torch.equal(log_a.grad, torch.zeros(3))
    m = RGLRU(8)
    with torch.no_grad():
        m.gates.bias.fill_(-200)  # r = 0 in float32
    m(torch.randn(1, 5, 8))[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())


def test_the_angles_start_as_constants_of_each_pair():
    m = RotLRU(24, 2, max_phase=0.5)
    assert torch.all((m.phase >= 0) & (m.phase <= 0.5))
    assert torch.all(m.gates.weight[..., -6:] == 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RGLRU(0), "d_model: expected a positive integer; got 0"),
        (lambda: RGLRU(24, 0), "num_heads: expected a positive integer; got 0"),
        (lambda: RGLRU(24, 5), "expand: expected .* multiple of 5 heads; got 1.0 \\* 24 = 24"),
        (lambda: RGLRU(24, expand=0), "expand: expected .*; got 0 \\* 24 = 0"),
        (lambda: RGLRU(24, decay_strength=0.0), "decay_strength: expected a positive number; got 0.0"),
        (lambda: RotLRU(9), "expand: expected an even number of channels a head; got 9"),
        (lambda: RotLRU(24, 5), "expand: expected .* multiple of 5 heads"),
        (lambda: RotLRU(24, max_phase=-1.0), "max_phase: expected a positive number; got -1.0"),
        (lambda: RotLRU(24, decay_strength=-1.0), "decay_strength: expected a positive number; got -1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mixer", [RGLRU, RotLRU])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 5, 7),), ValueError, r"x: expected shape \[B, T, d_model=8\]; got \[2, 5, 7\]"),
        ((torch.zeros(2, 5, 8).long(),), TypeError, "x: expected a floating-point dtype; got torch.int64"),
        ((torch.zeros(2, 5, 8), torch.zeros(2, 8)), TypeError, r"state: expected a tuple \(h\); got Tensor"),
        ((torch.zeros(2, 5, 8), (torch.zeros(3, 8),)), ValueError, r"state\[0\]: expected h of shape \[2, 8\]"),
        ((torch.zeros(2, 5, 8), (torch.zeros(2, 8).half(),)), TypeError, r"state\[0\]: expected h in torch.float32"),
        ((torch.zeros(2, 5, 8), None, torch.tensor([0, 5])), ValueError, "cu_seqlens: .*B = 1; got B = 2"),
    ],
)
def test_inputs_that_do_not_fit_are_named(mixer, arguments, error, message):
    with pytest.raises(error, match=message):
        mixer(8)(*arguments)
