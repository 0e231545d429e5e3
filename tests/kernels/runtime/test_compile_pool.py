"""Kernels compiled side by side at a first call: at one time, without memory, and with errors where they belong."""

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.kernels import select as planning
from holdfast.kernels.runtime import compile_pool as compiling
from holdfast.kernels.runtime.replay import recording, replay
from holdfast.ops import registration

LIMIT = 20


class Kernel:
    """In place of a Triton kernel. gate: what its compilation waits for; fails: how often compiling raises."""

    def __init__(self, gate=None, fails=0):
        self.gate, self.fails, self.compiled, self.launched, self.threads = gate, fails, 0, 0, []

    def warmup(self, *arguments, grid, **named):
        self.compiled += 1
        self.threads.append(threading.get_ident())
        if self.gate is not None:
            self.gate.wait(LIMIT)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("ptxas: no such instruction")
        return self

    def launch(self, x, known):
        """As descriptor_launch.py does: x + 1."""
        out = torch.zeros_like(x)
        if id(self) not in known:
            found = compiling.compiled(
                id(self), self, (1, 1, 1), (x, out, 3), {"SIZE": 4}, None, bool(recording.RECORDING)
            )
            if found is None:
                return out
            known[id(self)] = found
        self.launched += 1
        return out.copy_(x + 1)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    class Device:
        def __init__(self, device): ...

        def __enter__(self): ...

        def __exit__(self, *_): ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 8)
    compiling._pool.cache_clear()
    yield
    compiling._pool.cache_clear()
    assert not compiling._SUBMITTED
    assert compiling._HERE.stage == 0


def test_the_kernels_of_both_passes_compile_at_the_same_time():
    gate, known, runs = threading.Barrier(3), {}, []
    first, second, behind = Kernel(gate), Kernel(gate), Kernel(gate)

    def run(x, scale=1.0):
        runs.append(scale)
        return second.launch(first.launch(x, known), known) * scale

    x = torch.randn(3)
    out = compiling.with_parallel_compile(
        run, (x,), {"scale": 2.0}, lambda given, made: behind.launch(given[0] + made, known)
    )
    assert torch.allclose(out, (x + 2) * 2)
    # an attempt that ends at the first kernel, a dry run, the call
    assert runs == [2.0] * 3
    assert [k.compiled for k in (first, second, behind)] == [1, 1, 1]
    assert [k.launched for k in (first, second, behind)] == [1, 1, 0]
    assert len({*first.threads, *second.threads, *behind.threads, threading.get_ident()}) == 4
    assert torch.equal(behind.launch(x, known), x + 1)
    assert behind.compiled == 1
    compiling.with_parallel_compile(run, (x,), {}, lambda *_: pytest.fail("nothing was missing"))
    assert len(runs) == 4


def test_what_fails_to_compile_is_raised_where_it_is_launched():
    known = {}
    good, bad, behind = Kernel(), Kernel(fails=1), Kernel(fails=1)

    def run(x):
        return bad.launch(good.launch(x, known), known)

    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="no such instruction"):
        compiling.with_parallel_compile(run, (x,), {}, lambda given, _: behind.launch(given[0], known))
    assert good.launched == 1
    # as without a dry run, the next call tries again
    assert torch.equal(compiling.with_parallel_compile(run, (x,), {}), x + 2)
    with pytest.raises(RuntimeError, match="no such instruction"):
        behind.launch(x, known)
    assert torch.equal(behind.launch(x, known), x + 1)


def test_errors_of_the_call_are_its_own():
    known, kernel = {}, Kernel()

    def run(x):
        kernel.launch(x, known)
        raise ValueError("x: expected something else")

    with pytest.raises(ValueError, match="expected something else") as error:
        compiling.with_parallel_compile(run, (torch.randn(3),), {})
    assert error.value.__context__ is None

    def fails(*_):
        raise ValueError("the backward pass is not there")

    known.clear()
    assert compiling.with_parallel_compile(lambda x: kernel.launch(x, known), (torch.zeros(1),), {}, fails) == 1


def test_an_op_that_tries_something_else_does_not_take_a_missing_kernel_for_an_error():
    known, kernel, behind, tried = {}, Kernel(), Kernel(), []

    def run(x):
        try:
            return behind.launch(kernel.launch(x, known), known)
        except Exception:
            tried.append("something else")
            return x

    x = torch.randn(3)
    assert torch.equal(compiling.with_parallel_compile(run, (x,), {}), x + 2)
    assert not tried


def test_memory_does_not_wait_for_a_compiler():
    gate, known, kernel = threading.Event(), {}, Kernel()
    slow, refs = Kernel(gate), []

    def then(given, made):
        refs.append(weakref.ref(made))
        slow.launch(made, known)

    compiling.with_parallel_compile(lambda x: kernel.launch(x, known), (torch.randn(3),), {}, then)
    gc.collect()
    assert refs[0]() is None
    assert slow.compiled == 1
    gate.set()
    slow.launch(torch.randn(3), known)


def test_what_is_begun_is_known_by_type_and_alignment():
    x = torch.zeros(64)
    for y in (x, x[1:], x[4:], x.int()):
        like = compiling.without_memory(y)
        assert (like.dtype, like.data_ptr()) == (y.dtype, y.data_ptr() % 16)
    tiles = SimpleNamespace(base=x, shape=[8, 8], strides=[8, 1])
    like = compiling.without_memory(tiles)
    assert (like.shape, like.strides, tiles.base) == ([8, 8], [8, 1], x)
    assert not isinstance(like.base, torch.Tensor)
    assert compiling.without_memory(5) == 5
    assert compiling.without_memory(None) is None


def test_a_mode_sees_each_operation_once():
    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += 1
            return op(*args, **(kwargs or {}))

    known, kernel, runs = {}, Kernel(), []
    with Seen() as seen:
        compiling.with_parallel_compile(lambda x: runs.append(1) or kernel.launch(x, known), (torch.randn(3),), {})
    assert len(runs) == 1
    assert seen.count < 6


def test_a_dry_run_is_not_recorded(monkeypatch):
    """What is replayed from then on launches."""
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    known, kernel = {}, Kernel()
    call = replay.replayed(lambda x: kernel.launch(x, known) * 2)
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(call(x), (x + 1) * 2)
    planning.forget()


def test_what_changes_its_arguments_has_no_dry_run(monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    known, first, second = {}, Kernel(), Kernel()

    def step(x, state):
        out = first.launch(x, known)
        state.add_(1)
        return second.launch(out, known)

    call = replay.replayed(step, changes=True)
    state = torch.zeros(3)
    for n in range(4):
        assert torch.equal(call(torch.ones(3), state), torch.full((3,), 3.0))
        assert torch.equal(state, torch.full((3,), n + 1.0))
    planning.forget()


def test_a_child_process_compiles_itself():
    known, kernel = {}, Kernel()
    compiling._SUBMITTED[id(kernel)] = Future()
    compiling._after_fork()
    assert torch.equal(kernel.launch(torch.zeros(2), known), torch.ones(2))


@pytest.mark.slow
def test_threads_end_with_python():
    script = """
import time, torch
from contextlib import nullcontext
from holdfast.kernels.runtime import compile_pool as compiling
torch.cuda.device = lambda device: nullcontext()

class Kernel:
    def warmup(self, *_, **__):
        time.sleep(1.0)
        print("compiled ", end="", flush=True)
        return self

def run(x):
    return compiling.compiled(1, Kernel(), (1, 1, 1), (x,), {}, None, False)

def then(*_):
    compiling.compiled(2, Kernel(), (1, 1, 1), (), {}, None, False)

compiling.with_parallel_compile(run, (torch.zeros(1),), {}, then)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.split() == ["compiled"] * 2


def test_an_op_compiles_its_backward_pass_beside_its_forward_pass(monkeypatch):
    gate, known = threading.Barrier(2), {}
    forward, backward = Kernel(gate), Kernel(gate)

    def _run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return forward.launch(x, known), torch.zeros(1)

    def _gradient(ctx, dy, dz):
        (x,) = ctx.saved_tensors
        assert dz is None
        return (backward.launch(dy, known) - 1 + 0 * x,)

    op = registration.define("test_compiling", _run, lambda x: (torch.empty_like(x), x.new_empty(1)))
    call = registration.differentiable(op, lambda ctx, given: ctx.save_for_backward(*given), _gradient, 1)
    x = torch.randn(3, requires_grad=True)
    y, _ = call(x)
    assert (forward.compiled, backward.compiled, backward.launched) == (1, 1, 0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(grad, torch.ones(3))
    assert (forward.compiled, backward.compiled, backward.launched) == (1, 1, 1)


def test_dynamo_is_not_imported_for_a_call():
    """Its import takes longer than the kernels of a first call."""
    script = """
import sys, torch, holdfast
q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
g = torch.zeros(1, 4, 2, requires_grad=True)
for _ in range(3):
    holdfast.simple_gla(q, k, v, g)[0].sum().backward()
from holdfast.kernels.runtime.replay import replay
replay.allow(torch.device("cpu"))
with torch.no_grad():
    for _ in range(4):
        holdfast.simple_gla(q, k, v, g)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
