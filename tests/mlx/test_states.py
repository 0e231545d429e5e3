"""What must hold of any scan with a state: it can be cut anywhere, looks only back, and starts and ends somewhere."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_support.cases import SCANS
from mlx_support.oracle import assert_close, exact, ours, relative_error

every_scan = pytest.mark.parametrize("name", SCANS)
every_path = pytest.mark.parametrize("backend", ["metal", "mlx"])


@every_scan
@every_path
@pytest.mark.parametrize("at", [1, 8, 20])
def test_a_call_may_be_cut_anywhere(metal, name, backend, at):
    """Two calls, the state handed on, are one call; so are their gradients, which cross the cut through the state."""
    case = SCANS[name](B=1, L=21)

    def in_two(*xs, initial_state):
        moving = len(xs) - case.constants
        first, second = ([x[:, part] for x in xs[:moving]] for part in (slice(at), slice(at, None)))
        y, state = case.scan(*first, *xs[moving:], seg=8, initial_state=initial_state, backend=backend)
        rest, final = case.scan(*second, *xs[moving:], seg=8, initial_state=state, backend=backend)
        return mx.concatenate([y, rest], axis=1), final

    assert_close(ours(in_two, case.inputs, case.state, case.weights), case.oracle(), 2e-5)


@every_scan
def test_cut_outputs_are_the_same_bit_for_bit(metal, name):
    case = SCANS[name](B=1, L=21)
    y, final = case.scan(*case.inputs, initial_state=case.state)
    first, state = case.scan(*case.tokens(slice(13)), initial_state=case.state)
    rest, last = case.scan(*case.tokens(slice(13, None)), initial_state=state)
    assert mx.array_equal(mx.concatenate([first, rest], axis=1), y)
    assert mx.array_equal(last, final)


@every_scan
@every_path
def test_gradients_through_the_final_state_alone(metal, name, backend):
    case = SCANS[name](B=1, L=9)
    weight = case.weights[1]

    def loss(*xs):
        return (weight * case.scan(*xs[:-1], initial_state=xs[-1], backend=backend)[1]).sum()

    grads = mx.grad(loss, argnums=list(range(len(case.inputs) + 1)))(*case.inputs, case.state)
    expected = exact(case.exact, case.inputs, case.state, [mx.zeros(case.y_shape), weight])["grads"]
    # the queries do not reach the state
    assert any(np.abs(g).max() > 0 for g in expected)
    assert all(relative_error(g, e) <= 2e-5 for g, e in zip(grads, expected, strict=True))


@every_scan
@every_path
def test_nothing_looks_ahead(metal, name, backend):
    case = SCANS[name](B=1, L=11)
    moving = len(case.inputs) - case.constants
    changed = [mx.concatenate([x[:, :6], x[:, 6:] + 1], axis=1) for x in case.inputs[:moving]]
    y = case.scan(*case.inputs, initial_state=case.state, backend=backend)[0]
    other = case.scan(*changed, *case.inputs[moving:], initial_state=case.state, backend=backend)[0]
    assert mx.array_equal(y[:, :6], other[:, :6])
    assert not mx.array_equal(y[:, 6:], other[:, 6:])

    def loss(*xs):
        return case.scan(*xs, initial_state=case.state, backend=backend)[0][:, :6].sum()

    for grad in mx.grad(loss, argnums=list(range(moving)))(*case.inputs):
        assert mx.abs(grad[:, 6:]).max().item() == 0
        assert mx.abs(grad[:, :6]).max().item() > 0


@every_scan
@every_path
def test_no_state_is_a_state_of_zeros(metal, name, backend):
    case = SCANS[name](B=1, L=5)
    found = [case.scan(*case.inputs, initial_state=s, backend=backend) for s in (None, mx.zeros_like(case.state))]
    assert all(mx.array_equal(x, y) for x, y in zip(*found, strict=True))


@every_scan
@every_path
def test_a_step_is_a_call_of_one_token(metal, name, backend):
    case = SCANS[name](B=2, L=7)
    y, final = case.scan(*case.inputs, initial_state=case.state, backend=backend)
    state, moving = case.state, len(case.inputs) - case.constants
    for t in range(7):
        one, state = case.step(*[x[:, t] for x in case.inputs[:moving]], *case.inputs[moving:], state)
        assert mx.allclose(one, y[:, t], rtol=1e-5, atol=1e-5)
    assert mx.allclose(state, final, rtol=1e-5, atol=1e-5)


@every_scan
@every_path
@pytest.mark.parametrize("sizes", [{"L": 0}, {"B": 0}])
def test_nothing_in_is_nothing_out(metal, name, backend, sizes):
    case = SCANS[name](**sizes)
    found = case.run(backend=backend)
    y, final = found["values"]
    assert y.shape == case.y_shape
    assert mx.array_equal(final, case.state)
    assert [g.shape for g in found["grads"]] == [x.shape for x in [*case.inputs, case.state]]
    assert mx.array_equal(found["grads"][-1], case.weights[1])
    assert metal.launches == []
    assert case.reference(*case.inputs).shape == case.y_shape
