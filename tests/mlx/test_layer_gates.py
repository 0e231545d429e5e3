"""The gates of the linear recurrent units where floats end: a decay of 1, and one of 0."""

import mlx.core as mx
import numpy as np
import pytest

from holdfast.mlx.nn import gates


def test_a_gate_of_one_writes_nothing_and_its_gradient_is_zero():
    """sqrt(1 - a^2) has no slope at a = 1: the gradient stops there instead of turning infinite."""
    log_a = mx.zeros((3,))
    assert mx.abs(gates.input_scale(log_a)).max().item() <= 2e-15
    assert mx.grad(lambda x: gates.input_scale(x).sum())(log_a).tolist() == [0.0, 0.0, 0.0]


def test_the_input_scale_near_one_and_at_zero():
    """Exact where 1 - a^2 would cancel: at log a = -1e-12 it is sqrt(2e-12)."""
    log_a = [-1e-12, -1e-6, -0.01, -1.0, -30.0, -np.inf]
    found = np.array(gates.input_scale(mx.array(log_a)), np.float64)
    assert found == pytest.approx(np.sqrt(-np.expm1(2 * np.array(log_a))), rel=1e-6)
    slopes = np.array(mx.grad(lambda x: gates.input_scale(x).sum())(mx.array(log_a[:-1])), np.float64)
    a = np.exp(2 * np.array(log_a[:-1]))
    assert slopes == pytest.approx(-a / np.sqrt(-np.expm1(2 * np.array(log_a[:-1]))), rel=1e-5)


def test_decays_start_between_their_bounds():
    rate = gates.initial_rate(2000, 8.0)
    a = np.exp(np.array(gates.log_magnitude(mx.full((2000,), mx.inf), rate, 8.0), np.float64))
    assert 0.9 - 1e-5 <= a.min() < 0.901
    assert 0.998 < a.max() <= 0.999 + 1e-5
    assert a.mean() == pytest.approx(0.9495, abs=0.003)


def test_the_magnitude_is_float32_whatever_the_gate_is():
    found = gates.log_magnitude(mx.array([0.0, 1.0], mx.bfloat16), mx.array([0.5, -0.5]), 8.0)
    assert found.dtype == mx.float32
    expected = -8 * np.log1p(np.exp([0.5, -0.5])) / (1 + np.exp([-0.0, -1.0]))
    assert np.array(found) == pytest.approx(expected, rel=1e-6)
