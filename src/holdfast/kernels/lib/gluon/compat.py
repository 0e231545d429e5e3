"""What the Gluon kernels take from Triton, under one name whatever its version, 3.6 to 3.9.

Gluon is Triton's lower language (triton.experimental.gluon): its author places layouts, copies, barriers and warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

try:
    tma_load, tma_store = tma.async_load, tma.async_store
except AttributeError:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

tma_store_wait = tma.store_wait

# For what has constants or methods. A NamedTuple, made by keyword, carries tensors, descriptors, shared memory and
# None; constants do not stay constant in it: tests/kernels/lib/gluon/test_aggregates.py.
try:
    aggregate = gluon.aggregate
except AttributeError:
    from triton.language.core import _aggregate as aggregate

try:
    copy_to_shared = async_copy.async_load
except AttributeError:
    copy_to_shared = async_copy.async_copy_global_to_shared

try:
    barrier = gl.barrier
except AttributeError:
    barrier = gl.thread_barrier


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory, as another type, shape and layout."""
    view = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


__all__ = [
    "aggregate",
    "async_copy",
    "barrier",
    "copy_to_shared",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
