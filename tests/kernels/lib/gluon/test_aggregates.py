"""Named tuples and aggregates in Gluon kernels: compiled as they are emulated.

A NamedTuple carries what belongs together to helpers and partitions: tensors, descriptors, shared memory, None, other
tuples. Constants do not stay constant in one that has been assigned to a name. It is made by keyword: the cache of
compiled kernels does not see a change of its order. Triton's tuples have `type` and `values` themselves, so no field
has these names. An aggregate has constants and methods too, checks its fields' types, and takes no None.
"""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from gluon_compile import Recorded, compile_launch
from gluon_emulator import Emulated
from gluon_partitions_emulator import launch
from holdfast.kernels.lib.gluon.compat import aggregate, barrier, gl, gluon, mbarrier

ROUNDS = 5


class Places(NamedTuple):
    """Where rows are read, written and counted."""

    source: gl.tensor
    out: gl.tensor
    bias: gl.tensor


@aggregate
class Ring:
    """A stage and the parity of its barriers."""

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, stage, phase, STAGES):
        self.stage = stage
        self.phase = phase
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def after(self):
        ends = self.stage + 1 == self.STAGES
        return Ring(gl.where(ends, 0, self.stage + 1), gl.where(ends, self.phase ^ 1, self.phase), self.STAGES)


class Pipeline(NamedTuple):
    """Shared memory of some stages and its barriers."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def _row(places, i, columns):
    x = gl.load(places.source + i * 32 + columns)
    if places.bias is not None:
        x += gl.load(places.bias + columns)
    return x


@gluon.jit
def add_rows(source, bias, out, count):
    """out [ROUNDS, 32] = source, with bias [32] added if there is one."""
    columns = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    places = Places(source=source, out=out, bias=bias)
    ring = Ring(gl.program_id(0), gl.program_id(0), 3)
    for i in range(count):
        gl.store(places.out + i * 32 + columns, _row(places, i, columns) + ring.stage * 10 + ring.phase)
        ring = ring.after()


@gluon.jit
def _load_partition(places, pipeline, ring, count):
    columns = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(count):
        mbarrier.wait(pipeline.empty.index(ring.stage), ring.phase ^ 1)
        pipeline.tiles.index(ring.stage).store(_row(places, i, columns))
        barrier()
        mbarrier.arrive(pipeline.ready.index(ring.stage), count=1)
        ring = ring.after()


@gluon.jit
def _store_partition(places, pipeline, ring, count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, 32, layout)
    for i in range(count):
        mbarrier.wait(pipeline.ready.index(ring.stage), ring.phase)
        row = pipeline.tiles.index(ring.stage).load(layout)
        gl.store(places.out + i * 32 + columns, row + ring.stage * 10 + ring.phase)
        barrier()
        mbarrier.arrive(pipeline.empty.index(ring.stage), count=1)
        ring = ring.after()


@gluon.jit
def add_rows_by_partitions(source, bias, out, count):
    """The same, handed from one partition to another."""
    tiles = gl.allocate_shared_memory(gl.float32, [3, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    barrier()
    places = Places(source=source, out=out, bias=bias)
    pipeline = Pipeline(tiles=tiles, ready=ready, empty=empty)
    ring = Ring(gl.program_id(0), gl.program_id(0), 3)
    gl.warp_specialize(
        [(_store_partition, (places, pipeline, ring, count)), (_load_partition, (places, pipeline, ring, count))],
        [1],
        [40],
    )


def example(with_bias):
    draw = torch.Generator().manual_seed(0)
    source, bias = torch.randn(ROUNDS, 32, generator=draw), torch.randn(32, generator=draw)
    marks = torch.tensor([0.0, 10.0, 20.0, 1.0, 11.0])
    bias = bias if with_bias else None
    wanted = (source + bias if with_bias else source) + marks[:, None]
    return source, bias, torch.full((ROUNDS, 32), torch.nan), wanted


@pytest.mark.parametrize("with_bias", [False, True])
def test_emulated(with_bias):
    source, bias, out, wanted = example(with_bias)
    Emulated(add_rows)[(1,)](source, bias, out, ROUNDS)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernel", [add_rows, add_rows_by_partitions])
def test_emulated_in_partitions(kernel, with_bias):
    source, bias, out, wanted = example(with_bias)
    launch(kernel, (1, 1, 1), (source, bias, out, ROUNDS), {}, 4, None)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernel", [add_rows, add_rows_by_partitions])
def test_compiles(kernel, with_bias):
    source, bias, out, _ = example(with_bias)
    compiled = compile_launch(Recorded(kernel, (source, bias, out, ROUNDS), {}, 4))
    assert compiled.ptx.count("st.global") == 1
