"""Outputs, final states and every gradient against the float64 oracle, by the Metal sources and by the plain path."""

from dataclasses import replace

import mlx.core as mx
import pytest

from holdfast.mlx import chassis
from mlx_support.cases import SCANS, SIZES, label
from mlx_support.oracle import assert_close, ours, relative_error

LIMIT = 2e-5
SIZED = [pytest.param(name, sizes, id=f"{name}-{label(sizes)}") for name in SCANS for sizes in SIZES[name]]
every_size = pytest.mark.parametrize(("name", "sizes"), SIZED)
every_scan = pytest.mark.parametrize("name", SCANS)


@every_size
def test_metal(metal, name, sizes):
    case = SCANS[name](**sizes)
    # segments of 16: three levels of kept states, with remainders
    got = case.run(seg=16)
    assert_close(got, case.oracle(), LIMIT)
    assert [launch.kernel for launch in metal.launches] == case.launched


@every_size
def test_plain_path(name, sizes):
    case = SCANS[name](**sizes)
    assert_close(case.run(seg=16, backend="mlx"), case.oracle(), LIMIT)


@every_size
def test_plain_path_in_spans(monkeypatch, name, sizes):
    """Shorter than a chunk, with a remainder, the state handed from one to the next."""
    monkeypatch.setattr(chassis, "SPAN", 13)
    monkeypatch.setattr(chassis, "LEAST_CHUNKED", 2)
    case = SCANS[name](**sizes)
    assert_close(case.run(backend="mlx"), case.oracle(), LIMIT)


@every_scan
def test_plain_path_takes_no_step_a_token(monkeypatch, name):
    def no_step(*_):
        raise AssertionError("a step")

    case = SCANS[name](B=1, L=40, **({"G": 4} if name == "gated_delta" else {}))
    without = replace(case.definition, step=no_step)
    y, _ = without.run(case.inputs, case.state, case.y_shape, 32, "mlx")
    assert relative_error(y, case.oracle()["values"][0]) <= LIMIT
    with pytest.raises(AssertionError, match="a step"):
        replace(without, chunked=None).run(case.inputs, case.state, case.y_shape, 32, "mlx")


@every_scan
@pytest.mark.parametrize("seg", [1, 5, 64])
def test_any_segment(metal, name, seg):
    case = SCANS[name](B=1, L=21)
    assert_close(case.run(seg=seg), case.oracle(), LIMIT)
    assert_close(case.run(seg=seg, backend="mlx"), case.oracle(), LIMIT)


def bf16_errors(case, found):
    exact = case.oracle()
    return [relative_error(x, y) for part in exact for x, y in zip(found[part], exact[part], strict=True)]


@every_scan
def test_bfloat16(metal, name):
    case = SCANS[name](B=1, L=24).cast(mx.bfloat16)
    found = case.run(seg=16)
    y, final = found["values"]
    assert y.dtype == mx.bfloat16
    assert final.dtype == mx.float32
    assert [g.dtype for g in found["grads"]] == [mx.bfloat16] * len(case.inputs) + [mx.float32]

    # the loop in float32 on the same numbers, its output and gradients rounded by mlx's own differentiation
    def loop(*xs, initial_state):
        y = case.reference(*xs, initial_state=initial_state)
        return y, case.scan(*xs, initial_state=initial_state, backend="mlx")[1]

    plain = ours(loop, case.inputs, case.state, case.weights)
    for error, beside in zip(bf16_errors(case, found), bf16_errors(case, plain), strict=True):
        assert error <= max(2 * beside, LIMIT)


@every_scan
def test_mixed_dtypes(metal, name):
    """Each gradient comes back in its own input's dtype."""
    case = SCANS[name](B=1, L=9)
    dtypes = [(mx.float16, mx.float32, mx.bfloat16)[i % 3] for i in range(len(case.inputs))]
    inputs = [x.astype(dtype) for x, dtype in zip(case.inputs, dtypes, strict=True)]
    case = replace(case, inputs=inputs)
    found = case.run()
    assert [g.dtype for g in found["grads"]] == [*dtypes, mx.float32]
    assert max(bf16_errors(case, found)) < 1e-2


@every_scan
def test_reference(name):
    case = SCANS[name]()
    got = case.reference(*case.inputs, initial_state=case.state)
    assert relative_error(got, case.oracle()["values"][0]) <= LIMIT


@every_scan
def test_compiled(name):
    """mx.compile takes the plain path, gradient included. Kernels inside it need mlx itself to launch them.

    Each step is compiled by itself: of three, the one in the middle has one on either side.
    """
    case = SCANS[name](B=1, L=3)

    def loss(*xs):
        return case.scan(*xs, initial_state=case.state, backend="mlx")[0].sum()

    argnums = list(range(len(case.inputs)))
    plain, compiled = (f(*case.inputs) for f in (mx.grad(loss, argnums), mx.compile(mx.grad(loss, argnums))))
    for x, y in zip(plain, compiled, strict=True):
        assert mx.allclose(x, y, rtol=1e-5, atol=1e-5)
