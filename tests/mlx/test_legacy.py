"""The full-history forms: right by the oracle, whatever the gates, in every way that they run."""

import mlx.core as mx
import numpy as np
import pytest

import holdfast.mlx as hm
from mlx_support import oracle
from mlx_support.cases import normal, uniform

LIMIT = 2e-5
STRONG = float(np.exp(-50))


def gla_inputs(B=2, L=37, H=2, K=5, V=7):
    gates = uniform(-1, 1, (B, L, H))
    for t, value in ((3, 0.0), (4, 0.0), (9, 1e-30), (10, 1e-30), (14, STRONG), (15, STRONG), (36, 0.0)):
        gates[:, t] = value
    return [normal((B, L, H, K)), normal((B, L, H, K)), normal((B, L, H, V)), gates]


def selective_inputs(B=2, L=37, D=7, N=5):
    # decays from none to e^-50 and beyond
    rates = -mx.exp(uniform(-6, 4, (D, N)))
    return [normal((B, L, D)), uniform(0.01, 1, (B, L, D)), normal((B, L, N)), normal((B, L, N)), rates]


def assert_right(function, exact, inputs, state_shape, limit=LIMIT):
    state = mx.zeros(state_shape)
    weight = normal(inputs[2].shape if exact is oracle.gla else inputs[0].shape)
    expected = oracle.exact(exact, inputs, state, [weight, state])

    def loss(*xs):
        y = function(*xs)
        return (weight * y).sum(), y

    (_, y), grads = mx.value_and_grad(loss, argnums=list(range(len(inputs))))(*inputs)
    assert [y.dtype, *(g.dtype for g in grads)] == [inputs[0].dtype] * (1 + len(inputs))
    # the last gradient is the initial state's, which these forms do not have
    pairs = zip([y, *grads], [expected["values"][0], *expected["grads"][:-1]], strict=True)
    errors = [oracle.relative_error(x, e) for x, e in pairs]
    assert max(errors) <= limit, errors


GLA_SIZES = [{}, {"B": 1, "K": 64, "V": 70, "H": 1}]
SELECTIVE_SIZES = [{}, {"B": 1, "D": 140, "N": 16}]


@pytest.mark.parametrize("sizes", GLA_SIZES)
def test_gla_by_metal(metal, sizes):
    inputs = gla_inputs(**sizes)
    assert_right(
        hm.gla_scan_metal, oracle.gla, inputs, (*inputs[0].shape[:1], *inputs[0].shape[2:], inputs[2].shape[3])
    )
    assert [launch.kernel for launch in metal.launches] == ["gla_history_forward", "gla_history_backward"]


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 64])
def test_gla_chunked(chunk_size):
    inputs = gla_inputs()
    assert_right(lambda *xs: hm.gla_scan_chunked(*xs, chunk_size), oracle.gla, inputs, (2, 2, 5, 7))


def test_gla_without_metal():
    assert_right(hm.gla_scan_metal, oracle.gla, gla_inputs(), (2, 2, 5, 7))


@pytest.mark.parametrize("sizes", SELECTIVE_SIZES)
def test_selective_by_metal(metal, sizes):
    inputs = selective_inputs(**sizes)
    assert_right(hm.selective_scan_metal, oracle.selective, inputs, (inputs[0].shape[0], *inputs[4].shape))
    assert [launch.kernel for launch in metal.launches] == ["selective_forward", "selective_backward"]


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 64])
def test_selective_chunked(chunk_size):
    inputs = selective_inputs()
    assert_right(lambda *xs: hm.selective_scan_chunked(*xs, chunk_size), oracle.selective, inputs, (2, 7, 5))


def test_selective_without_metal():
    assert_right(hm.selective_scan_metal, oracle.selective, selective_inputs(), (2, 7, 5))


@pytest.mark.parametrize("path", ["metal", "plain", "chunked"])
@pytest.mark.parametrize("scan", ["gla", "selective"])
def test_bfloat16(request, path, scan):
    """Outputs and gradients in the inputs' dtype, within two roundings of it."""
    if path == "metal":
        request.getfixturevalue("metal")
    function = getattr(hm, f"{scan}_scan_{'chunked' if path == 'chunked' else 'metal'}")
    inputs = [x.astype(mx.bfloat16) for x in (gla_inputs() if scan == "gla" else selective_inputs())]
    shape = (2, 2, 5, 7) if scan == "gla" else (2, 7, 5)
    assert_right(function, getattr(oracle, scan), inputs, shape, 2 * 2**-8)


@pytest.mark.parametrize("function", [hm.gla_scan_metal, hm.gla_scan_chunked])
def test_empty_gla(function):
    assert function(*[x[:, :0] for x in gla_inputs()]).shape == (2, 0, 2, 7)


@pytest.mark.parametrize("function", [hm.selective_scan_metal, hm.selective_scan_chunked])
def test_empty_selective(function):
    *moving, rates = selective_inputs()
    assert function(*[x[:, :0] for x in moving], rates).shape == (2, 0, 7)
