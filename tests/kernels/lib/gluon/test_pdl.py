"""Programmatic dependent launch: the wait for the launch ahead, and what starts the next, are in the machine code."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from holdfast.kernels.lib.gluon.compat import gl, gluon
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait, launch_dependents
from triton_compile import compile_for


@gluon.jit
def copy(x_ptr, y_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    launch_dependents()
    grid_dependency_wait()
    gl.store(y_ptr + at, gl.load(x_ptr + at))


def test_neither_is_left_out_and_nothing_is_read_before_the_wait_compiles():
    """Nothing takes their results: the compiler may drop what it takes for a function of nothing."""
    ptx = compile_for(copy, 90, {"x_ptr": torch.float32, "y_ptr": torch.float32}, num_warps=4).ptx
    places = [ptx.find(text) for text in ("griddepcontrol.launch_dependents", "griddepcontrol.wait", "ld.global")]
    assert -1 not in places
    assert places == sorted(places)
