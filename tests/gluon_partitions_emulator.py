"""Runs Gluon kernels for Hopper on the CPU: partitions of warps as threads, with barriers, TMA copies and wgmma.

With gluon_emulator.py's operations. What runs by itself is done as badly as it may be: a TMA copy into shared memory
overwrites what is there as soon as it starts, one out of it reads no sooner than at the wait for it, and so does a
product, whose result is NaN until then. What TMA stores is in memory when that is waited for too, or when the partition
ends. What a barrier waits for has to happen within seconds. No element of a result may be written twice: results are to
hold NaN beforehand, as conftest.py fills new memory.
"""

import math
import threading
import types
from typing import Any

import torch

from gluon_emulator import DType, Pointer, Shared, Value, _Language, _raw, load, rebinding, store

_SECONDS = 20
_BARRIERS = "barriers"


class _Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have come."""

    def __init__(self, block: "_Block") -> None:
        self.block, self.count, self.arrived, self.bytes, self.phase = block, 0, 0, 0, 0

    def add(self, arrived: int, moved: int) -> None:
        with self.block.changed:
            self.arrived += arrived
            self.bytes += moved
            assert self.arrived <= self.count, "more arrivals than the barrier counts"
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phase = 0, self.phase ^ 1
                self.block.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.block.changed:
            ended = self.block.changed.wait_for(lambda: self.phase != phase or self.block.failures, _SECONDS)
            assert ended, "nobody arrives at a barrier that is waited for"
            assert not self.block.failures, "another partition failed"


class _Barriers:
    def __init__(self, block: "_Block", count: int) -> None:
        self.each = [_Barrier(block) for _ in range(count)]

    def index(self, i: Any) -> _Barrier:
        return self.each[int(i)]


def _one(barriers: Any) -> _Barrier:
    return barriers.index(0) if isinstance(barriers, _Barriers) else barriers


class Tiles:
    """A tensor in tiles, as a kernel sees its descriptor."""

    def __init__(self, descriptor: Any) -> None:
        self.base, self.block, self.layout = descriptor.base, list(descriptor.block_shape), descriptor.layout
        self.dtype, self.strides = DType(self.base.dtype), self.base.stride()
        self.block_type = types.SimpleNamespace(
            shape=self.block, nbytes=math.prod(self.block) * self.base.element_size()
        )

    def at(self, corner: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the part of a tile that lies within the tensor, its place in the tile)."""
        here, there = self.base.detach(), []
        for axis, (start, size) in enumerate(zip(corner, self.block, strict=True)):
            first, whole = int(_raw(start)), self.base.shape[axis]
            assert first >= 0
            kept = max(0, min(size, whole - first))
            here = here.narrow(axis, min(first, whole), kept)
            there.append(slice(0, kept))
        return here, tuple(there)


class _Block:
    """What the threads of one block share."""

    def __init__(self) -> None:
        self.changed, self.failures = threading.Condition(), []
        self.mine = threading.local()

    def start(self, warps: int) -> None:
        self.mine.warps, self.mine.products, self.mine.stores, self.mine.landing = warps, [], [], []


class _Grid:
    """The barrier of blocks that run at once."""

    def __init__(self, blocks: int) -> None:
        self.changed, self.blocks, self.arrived, self.failed = threading.Condition(), blocks, 0, False

    def before(self) -> Value:
        with self.changed:
            return Value(torch.tensor(-(self.arrived // self.blocks % 2), dtype=torch.int32))

    def arrive(self) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def wait(self, before: Value) -> None:
        with self.changed:
            turned = self.changed.wait_for(
                lambda: self.failed or (self.arrived // self.blocks % 2 == 0) != (int(before.data) >= 0), _SECONDS
            )
            assert turned, "a block that is waited for does not arrive"
            assert not self.failed, "another block failed"


class _Hopper:
    """The operations of one block, by the names under which kernels import them."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], warps: int, blocks: _Grid) -> None:
        self.block, self.blocks = _Block(), blocks
        self.block.start(warps)
        language = _Language(program[0], warps)
        allocate = language.allocate_shared_memory
        language.num_warps = lambda: self.block.mine.warps
        language.program_id = lambda axis: Value(torch.tensor(program[axis], dtype=torch.int32))
        language.num_programs = lambda axis: Value(torch.tensor(grid[axis], dtype=torch.int32))
        language.allocate_shared_memory = lambda dtype, shape, layout: (
            _Barriers(self.block, shape[0]) if layout == _BARRIERS else allocate(dtype, shape, layout)
        )
        language.load = lambda pointer, mask=None, other=None: load(pointer, mask, 0 if other is None else other)
        language.store = _store
        language.exp2 = lambda x: Value(torch.exp2(_raw(x)))
        language.reshape = lambda x, shape: Value(x.data.reshape(shape))
        language.permute = lambda x, order: Value(x.data.permute(order))
        language.split = lambda x: tuple(Value(part) for part in x.data.unbind(-1))
        language.join = lambda x, y: Value(torch.stack((x.data, y.data), -1))
        language.convert_layout = lambda x, layout, assert_trivial=False: x
        language.associative_scan = _scan
        language.inline_asm_elementwise = _move
        language.warp_specialize = self.warp_specialize
        for layout in (
            "DistributedLinearLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout"
        ):  # fmt: skip
            setattr(language, layout, lambda *how: None)
        self.names = {
            "gl": language,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: _BARRIERS,
                init=lambda barrier, count: setattr(_one(barrier), "count", count),
                expect=lambda barrier, size, pred=True: _one(barrier).add(1, size) if pred else None,
                wait=lambda barrier, phase, pred=True: _one(barrier).wait(int(_raw(phase))) if pred else None,
                arrive=lambda barrier, count=1, pred=True: _one(barrier).add(count, 0) if pred else None,
            ),
            "barrier": lambda: None,
            "reinterpret": Shared.reinterpret,
            "state_block": _state_block,
            "column_block": _panel,
            "to_float32": lambda x: x.to(DType(torch.float32)),
            "select_bits": lambda x, y, first: Value(torch.where(first.data == 0, y.data, x.data)),
            "fence_async_shared": lambda: None,
            "tma_load": self.tma_load,
            "tma_store": self.tma_store,
            "tma_store_wait": self.tma_store_wait,
            "warpgroup_mma": self.warpgroup_mma,
            "warpgroup_mma_wait": self.warpgroup_mma_wait,
            "mma_v2": _mma,
            # instructions of the processor, and shuffles between lanes, which are not emulated
            "grid_dependency_wait": lambda: None,
            "launch_dependents": lambda: None,
            "fence_generic_to_async": lambda: None,
            "tma_store_wait_written": self.land_stores,
            "grid_phase": blocks.before,
            "grid_arrive": blocks.arrive,
            "grid_wait": blocks.wait,
            "to_half": lambda x, dtype: Value(x.data.to(dtype.torch)),
            "round_to": lambda x, dtype: Value(x.data.to(dtype.torch).to(torch.float32)),
            "to_vectorized_rows": lambda x: x,
            "other_row": lambda x: Value(x.data.view(-1, 2, x.shape[1]).flip(1).view(x.shape)),
            "warp_column_sums": lambda x, warps: Value(x.data.view(warps, -1, x.shape[1]).sum(1)),
        }

    def warp_specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        def run(function: Any, arguments: Any, of: int) -> None:
            self.block.start(of)
            try:
                function(*arguments)
                self.land_stores()
                assert not self.block.mine.products
                assert not self.block.mine.stores
            except BaseException as failure:
                with self.block.changed:
                    self.block.failures.append(failure)
                    self.block.changed.notify_all()
                self.blocks.fail()

        own = self.block.mine.warps
        threads = [
            threading.Thread(target=run, args=(*partition, of), daemon=True)
            for partition, of in zip(partitions, [own, *warps], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.block.failures:
            raise self.block.failures[0]

    def tma_load(self, tiles: Tiles, corner: list[Any], barrier: Any, destination: Shared, pred: Any = True) -> None:
        if not pred:
            return
        here, there = tiles.at(corner)
        destination.data.zero_()
        destination.data[there] = here
        _one(barrier).add(0, -tiles.block_type.nbytes)

    def tma_store(self, tiles: Tiles, corner: list[Any], source: Shared) -> None:
        here, there = tiles.at(corner)
        self.block.mine.stores.append((here, source.data[there]))

    def tma_store_wait(self, outstanding: int) -> None:
        stores = self.block.mine.stores
        while len(stores) > outstanding:
            here, data = stores.pop(0)
            self.block.mine.landing.append((here, data.clone()))

    def land_stores(self) -> None:
        while self.block.mine.landing:
            here, data = self.block.mine.landing.pop(0)
            assert here.isnan().all(), "written twice"
            here.copy_(data)

    def warpgroup_mma(self, a: Any, b: Shared, sum_: Value, use_acc: bool = True, is_async: bool = False) -> Value:
        result = Value(torch.full_like(sum_.data, math.nan))

        def product() -> None:
            found = a.data.double() @ b.data.double()
            result.data = (found + sum_.data.double() if use_acc else found).float()

        self.block.mine.products.append(product)
        if not is_async:
            self.warpgroup_mma_wait(0)
        return result

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...] = ()) -> Any:
        products = self.block.mine.products
        while len(products) > outstanding:
            products.pop(0)()
        return deps if len(deps) > 1 else next(iter(deps), None)


def _mma(a: Value, b: Value, sum_: Value) -> Value:
    return Value((a.data.double() @ b.data.double() + sum_.data.double()).float())


def _state_block(matrix: Shared, row: int, column: int, layout: Any) -> Shared:
    """The same memory by other strides: here a matrix is not in panels."""
    part = matrix.data[64 * row : 64 * (row + 1), 64 * column : 64 * (column + 1)]
    return Shared(part[None, :, None, :])


def _panel(tile: Shared, half: Any) -> Shared:
    return tile.slice(64 * int(_raw(half)), 64, 1)


# memory that held numbers throughout before the launch: what a kernel adds to. All else is written once.
_HELD: set[int] = set()


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    if pointer.storage.is_floating_point() and pointer.storage.data_ptr() not in _HELD:
        assert load(pointer, mask, math.nan).data.isnan().all(), "written twice"
    store(pointer, Value(torch.tensor(value)) if isinstance(value, float) else value, mask)


def _scan(x: Value, axis: int, combine: Any, reverse: bool = False) -> Value:
    # sums are the only scans of these kernels
    assert float(_raw(combine(2.0, 3.0))) == 5.0
    return Value(x.data.flip(axis).cumsum(axis).flip(axis) if reverse else x.data.cumsum(axis))


def _move(text: str, constraints: str, arguments: list[Value], *how: Any, **options: Any) -> Value:
    assert text.startswith("mov")
    return arguments[0]


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if hasattr(x, "block_shape"):
        return Tiles(x)
    return Value(torch.tensor(x, dtype=torch.int32)) if isinstance(x, int) else x


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Any,
    constants: dict[str, Any],
    warps: int,
    types: Any,
    registers: int | None = None,
    pdl: bool = False,
    cooperative: bool = False,
) -> None:
    """In place of holdfast.kernels.runtime.descriptor_launch.launch; blocks run one after another, or all at once."""
    given = [_argument(x) for x in arguments]
    _HELD.clear()
    _HELD.update(
        x.data_ptr() for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.isnan().any()
    )
    failures: list[BaseException] = []
    blocks = _Grid(math.prod(grid))

    def run(place: tuple[int, int, int]) -> None:
        try:
            block = _Hopper(place, grid, warps, blocks)
            rebinding(block.names)(kernel.fn)(*given, **constants)
            block.land_stores()
        except BaseException as failure:
            failures.append(failure)

    places = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    if cooperative:
        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for place in places:
            run(place)
            if failures:
                break
    if failures:
        raise failures[0]
