"""Gates of every kind: negative, zero, one, and decays so strong that their running products underflow."""

from dataclasses import replace

import mlx.core as mx
import pytest

import holdfast.mlx as hm
from mlx_support.cases import SCANS
from mlx_support.oracle import assert_close

LIMIT = 2e-5
PATTERN = [0.0, 0.0, 1.0, -1.0, 1e-30, 1e-30, -0.5, 0.9, float(mx.exp(mx.array(-50.0)).item())]
every_path = pytest.mark.parametrize("backend", ["metal", "mlx"])


def pattern(shape):
    """Gates that take PATTERN's values along time, a different start for each channel."""
    values = mx.array(PATTERN)
    _, L, *channels = shape
    start = mx.arange(mx.zeros(channels).size).reshape(channels)
    turns = (mx.arange(L).reshape(L, *[1] * len(channels)) + start) % len(PATTERN)
    return mx.broadcast_to(values[turns], shape)


@every_path
@pytest.mark.parametrize(
    ("name", "sizes", "at"),
    [
        ("rglru", {}, 0),
        ("rotlru", {}, 0),
        ("gla", {}, 3),
        ("gla", {"vector": True}, 3),
        ("gated_delta", {}, 3),
        ("kda", {}, 3),
    ],
)
def test_any_real_gate(metal, backend, name, sizes, at):
    case = SCANS[name](B=1, L=29, **sizes)
    inputs = list(case.inputs)
    inputs[at] = pattern(inputs[at].shape)
    case = replace(case, inputs=inputs)
    assert_close(case.run(seg=16, backend=backend), case.oracle(), LIMIT)


@every_path
def test_a_strong_decay(metal, backend):
    """delta A around -50: what is older than a token is gone, and its gradient is small but right."""
    case = SCANS["ssd"](B=1, L=29)
    u, delta, B, C, A = case.inputs
    case = replace(case, inputs=[u, delta, B, C, 50 * A - 50])
    assert (delta.max() * case.inputs[4].min()).item() < -50
    assert_close(case.run(seg=16, backend=backend), case.oracle(), LIMIT)


@every_path
def test_no_decay(metal, backend):
    case = SCANS["ssd"](B=1, L=29)
    u, delta, B, C, A = case.inputs
    case = replace(case, inputs=[u, delta, B, C, mx.zeros_like(A)])
    assert_close(case.run(seg=16, backend=backend), case.oracle(), LIMIT)


def test_rotlru_without_turning_is_rglru(metal):
    case = SCANS["rotlru"](B=1, L=13)
    a, _, _, x = case.inputs
    y, final = hm.rotlru_scan_with_state(a, mx.ones_like(a), mx.zeros_like(a), x, initial_state=case.state)
    plain, last = hm.rglru_scan_with_state(mx.repeat(a, 2, axis=2), x, initial_state=case.state)
    assert mx.array_equal(y, plain)
    assert mx.array_equal(final, last)


def test_a_turn_keeps_the_length(metal):
    case = SCANS["rotlru"](B=1, L=13)
    a, cs, sn, x = case.inputs
    y = case.scan(mx.ones_like(a), cs, sn, mx.zeros_like(x), initial_state=case.state)[0]
    before, after = ((z.reshape(1, -1, 2) ** 2).sum(-1) for z in (case.state, y[:, -1]))
    assert mx.allclose(before, after, rtol=1e-5)
