"""torch.set_default_dtype, whatever it is: the same results bit for bit, on the first call and on later ones."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._pytree import tree_map

import holdfast
from every_call import CALLS, FUSED, PARTS
from fused_on_cpu import fused_on_cpu
from holdfast.kernels import select as planning
from holdfast.nn import LSTM
from holdfast.ops.families import backends_of
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import leaves, values_and_grads
from test_inductor import MIXERS

defaults = pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def same(got, right):
    assert len(got) == len(right)
    for x, y in zip(got, right, strict=True):
        # NaN too, as where a rule diverges
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check(run, arguments, default, times=1):
    """run's values and gradients under a default dtype are those under float32; the first call is under the former."""
    planning.forget()
    with default_dtype(default):
        found = [values_and_grads(run, arguments) for _ in range(times)]
        with torch.no_grad():
            found_without = [[x.double().cpu() for x in leaves(run(arguments))] for _ in range(times)]
    right = values_and_grads(run, arguments)
    for got in found:
        same(got, right)
    with torch.no_grad():
        right = [x.double().cpu() for x in leaves(run(arguments))]
    for got in found_without:
        same(got, right)


@defaults
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_call(name, default, dtype):
    check(CALLS[name], CALLS[name].arguments(dtype), default)


@defaults
@pytest.mark.parametrize("name", FUSED)
def test_with_inputs_prepared_by_a_kernel(name, default):
    with fused_on_cpu():
        call = (CALLS | PARTS)[name]
        check(call, call.arguments(torch.float32), default)


@defaults
@pytest.mark.parametrize("name", RECURRENCES)
def test_packed_sequences(name, default):
    op, offsets = CALLS[name], torch.tensor([0, 2, 2, 5])
    arguments = op.arguments(torch.float32, sizes=Sizes(B=1, T=5, H=2, K=4, V=3, D=4))
    del arguments["initial_state"]
    check(lambda given: op(given, cu_seqlens=offsets), arguments, default)


@defaults
@pytest.mark.parametrize("name", ["simple_gla", "mlstm", "gated_delta_rule"])
def test_a_step(name, default):
    arguments = CALLS[name].arguments(torch.float32, sizes=Sizes(B=2, T=1, H=2, K=4, V=3))
    initial = arguments.pop("initial_state")
    made = []
    for dtype in (default, torch.float32):
        state = tree_map(torch.clone, initial)
        with default_dtype(dtype):
            o = holdfast.step(name, arguments, state)
        made.append([o, *leaves(state)])
    same(*made)


@defaults
@pytest.mark.parametrize("name", [*MIXERS, "LSTM"])
@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_modules(name, default, kind):
    """Made under float32: a module's own parameters are of the default dtype, as torch.nn's are."""
    module = LSTM(8, 8) if name == "LSTM" else MIXERS[name]()
    x = torch.randn(1 if kind == "packed" else 2, 7, 8)
    given = {"cu_seqlens": torch.tensor([0, 3, 7])} if kind == "packed" and name != "LSTM" else {}
    check(lambda a: module(a["x"], **given), {"x": x}, default)


@pytest.mark.gpu
@defaults
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(name, default, dtype):
    """Recorded and replayed under the default dtype too, where the call is."""
    for sizes in (Sizes(B=2, T=5, H=2, K=16, V=16, D=16), Sizes(B=2, T=130, H=2, K=64, V=64, D=64)):
        check(CALLS[name], CALLS[name].arguments(dtype, sizes=sizes, device="cuda"), default, times=4)


@pytest.mark.gpu
@defaults
@pytest.mark.parametrize("name", RECURRENCES)
def test_every_backend_on_a_gpu(name, default):
    recurrence = RECURRENCES[name]
    arguments = recurrence.example(Draw(0, torch.bfloat16, "cuda"), Sizes(B=2, T=130, H=2, K=64, V=64, D=64))
    for backend in backends_of(recurrence):
        try:
            CALLS[name](arguments, backend=backend.name)
        except ValueError:
            # one that does not serve such a call
            continue
        check(lambda given, of=backend.name: CALLS[name](given, backend=of), arguments, default, times=4)
