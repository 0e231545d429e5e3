"""Launches that look compiled kernels up themselves: what they tell apart, and that they need nothing private."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from holdfast.kernels.runtime import assembler
from holdfast.kernels.runtime import compile_pool as compiling
from holdfast.kernels.runtime import launch as triton_launch


class Recorder(triton.JITFunction):
    """A kernel that counts what it would compile and what it launches, and how."""

    def __init__(self):
        self.fn, self.arg_names = object(), ["x", "SIZE"]
        self.compiled, self.launched = 0, []

    def warmup(self, *arguments, grid, **options):
        self.compiled += 1
        return {(4, 1, 1): lambda *given: self.launched.append(("compiled", *given))}

    def __getitem__(self, grid):
        return lambda *given, **options: self.launched.append(("own", *given, *options.values()))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "_COMPILED", {})
    return Recorder()


def run(kernel, x):
    is_number = isinstance(x, int | float)
    triton_launch.launch(kernel, (4,), () if is_number else (x,), (x,) if is_number else (), {"SIZE": 8}, 4)


def specialization(x):
    return native_specialize_impl(CUDABackend, x, False, True, True)


whole = torch.zeros(64)
VALUES = [
    0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 0.0, 1.0, 2.5, True,
    None, whole, whole[1:], whole[4:], whole.int(), whole.bfloat16(), whole.bfloat16()[1:], whole[:0],
]  # fmt: skip


def test_one_compiled_kernel_serves_only_what_triton_compiles_alike(kernel):
    for first, second in permutations(VALUES, 2):
        triton_launch._COMPILED.clear()
        kernel.compiled = 0
        run(kernel, first)
        run(kernel, second)
        if specialization(first) != specialization(second):
            assert kernel.compiled == 2, (first, second)


@pytest.mark.parametrize("order", list(permutations((1, 1.0, True))), ids=str)
def test_equal_constants_of_other_types_have_kernels_of_their_own(kernel, order):
    for n, size in enumerate(order):
        triton_launch.launch(kernel, (4,), (whole,), (), {"SIZE": size}, 4)
        assert kernel.compiled == n + 1
        assert type(kernel.launched[-1][-1]) is type(size)


def test_tritons_own_launch_has_the_newer_assembler_too(kernel):
    """Kernels with wgmma that are launched so, intra_chunk's say, are as short of registers as any other."""
    if not assembler._is_needed():
        pytest.skip("this Triton's own assembler is right")
    seen = []
    kernel.launched = SimpleNamespace(append=lambda _: seen.append(assembler._HERE.chooses))
    triton_launch.launch_by_triton(kernel, (4,), whole, SIZE=8)
    assert seen == [True]
    assert not assembler._HERE.chooses


def test_the_same_kinds_of_arguments_are_looked_up(kernel):
    for x in (32, 48, 4096, 32):
        run(kernel, x)
    assert kernel.compiled == 1
    assert kernel.launched == [("compiled", x, 8) for x in (32, 48, 4096, 32)]


def test_what_is_compiled_without_its_memory_is_compiled_alike():
    pytest.importorskip("triton.experimental.gluon")
    from holdfast.kernels.lib.gluon.compat import gl
    from holdfast.kernels.runtime import tma

    layout = gl.NVMMASharedLayout.get_default_for([8, 8], gl.float32)
    for x in (*VALUES, tma.tiles(whole.view(8, 8), [8, 8], layout)):
        assert specialization(compiling.without_memory(x)) == specialization(x)


def test_constants_out_of_order_are_refused(kernel):
    with pytest.raises(ValueError, match="constants: expected SIZE; got WIDTH"):
        triton_launch.launch(kernel, (4,), (whole,), (), {"WIDTH": 8}, 4)


def test_without_compiled_launches_tritons_own_runs(kernel, monkeypatch):
    monkeypatch.setattr(triton_launch, "LAUNCHES_COMPILED", False)
    run(kernel, 32)
    assert kernel.launched == [("own", 32, 8, 4)]
    assert kernel.compiled == 0


def test_this_triton_has_them():
    assert triton_launch.LAUNCHES_COMPILED


def test_gluon_kernels_likewise(kernel, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from holdfast.kernels.runtime import descriptor_launch, tma

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(descriptor_launch, "_COMPILED", {})
    arguments = (tma.tiles(whole, [64], None), 32)
    for types in (("a",), ("b",), ("a",)):
        descriptor_launch.launch(kernel, (4, 1, 1), arguments, {"SIZE": 8}, 4, types)
    assert kernel.compiled == 2
    assert kernel.launched == [("compiled", *arguments, 8)] * 3
    monkeypatch.setattr(descriptor_launch, "LAUNCHES_COMPILED", False)
    descriptor_launch.launch(kernel, (4, 1, 1), arguments, {"SIZE": 8}, 4, ("a",))
    assert kernel.launched[-1] == ("own", *arguments, 8, 4, None, False, False)
