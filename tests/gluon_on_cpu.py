"""Runs Hopper's Gluon kernels on a CPU: their own Python, with PyTorch tensors in place of registers and memory.

Each partition of a warp-specialised kernel is a thread, and barriers count arrivals and bytes as the GPU's do, so that
wrong places, phases and counts show: as wrong numbers, as a wait that does not end, as an element written twice.
Layouts, registers and what runs asynchronously are not modelled: products and copies are done when they are issued.
"""

import threading
import traceback
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.language import constexpr
from triton.runtime.jit import JITFunction

# seconds after which a wait is taken for a deadlock
PATIENCE = 20


class Register(torch.Tensor):
    """A tensor with Gluon's `to`."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Register":
        found = torch.Tensor.view(self, dtype) if bitcast else torch.Tensor.to(self, dtype)
        return found.as_subclass(Register)


def register(x: torch.Tensor) -> Register:
    return x.as_subclass(Register)


class Shared:
    """A descriptor of shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def index(self, i: int) -> "Shared":
        return Shared(self.tensor[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.tensor.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.tensor.view(*shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> Register:
        return register(self.tensor.clone())

    def store(self, x: torch.Tensor) -> None:
        assert self.shape == x.shape
        self.tensor.copy_(x)


class Pointer:
    """Offsets into a tensor's memory."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)

    def flat(self) -> torch.Tensor:
        x = self.tensor
        return x.as_strided((sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1,), (1,))


class Tiles:
    """A tensor descriptor."""

    def __init__(self, base: torch.Tensor, block: list[int]) -> None:
        self.base, self.dtype, self.layout = base, base.dtype, None
        self.block_type = SimpleNamespace(shape=block, nbytes=base.element_size() * torch.Size(block).numel())

    def at(self, corner: list[Any]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """What of the block at that corner is inside: of the tensor, and of the block."""
        inside, places = self.base, []
        for axis, (start, length) in enumerate(zip(corner, self.block_type.shape, strict=True)):
            first = min(int(start), inside.shape[axis])
            inside = inside.narrow(axis, first, min(length, inside.shape[axis] - first))
            places.append(slice(0, inside.shape[axis]))
        return inside, tuple(places)


class Barriers:
    """mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.changed, self.of = threading.Condition(), {}

    def init(self, barrier: Shared, count: int) -> None:
        self.of[barrier.tensor.data_ptr()] = SimpleNamespace(count=count, pending=count, missing=0, phase=0)

    def _add(self, barrier: Shared, arrivals: int, missing: int) -> None:
        with self.changed:
            state = self.of[barrier.tensor.data_ptr()]
            state.pending, state.missing = state.pending - arrivals, state.missing + missing
            assert state.pending >= 0, "more arrived than the barrier counts"
            if state.pending == state.missing == 0:
                state.phase, state.pending = state.phase ^ 1, state.count
                self.changed.notify_all()

    def expect(self, barrier: Shared, size: int) -> None:
        self._add(barrier, 1, size)

    def arrive(self, barrier: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            self._add(barrier, count, 0)

    def wait(self, barrier: Shared, phase: int) -> None:
        with self.changed:
            state = self.of[barrier.tensor.data_ptr()]
            assert self.changed.wait_for(lambda: state.phase != phase, PATIENCE), "a wait that does not end"

    def tma_load(self, source: Tiles, corner: list[Any], barrier: Shared, tile: Shared) -> None:
        inside, places = source.at(corner)
        tile.tensor.zero_()
        tile.tensor[places] = inside
        self._add(barrier, 0, -source.block_type.nbytes)


def _tma_store(target: Tiles, corner: list[Any], tile: Shared) -> None:
    inside, places = target.at(corner)
    assert inside.isnan().all(), "written twice"
    inside.copy_(tile.tensor[places])


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Register:
    inside = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask
    offset, inside = torch.broadcast_tensors(pointer.offset, inside)
    found = pointer.flat()[torch.where(inside, offset, 0).long()]
    return register(torch.where(inside, found, other))


def _store(pointer: Pointer, x: torch.Tensor, mask: Any = None) -> None:
    offset = pointer.offset.expand(x.shape)
    inside = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    places, memory = offset[inside].long(), pointer.flat()
    assert memory[places].isnan().all(), "written twice"
    assert places.unique().numel() == places.numel(), "written twice"
    memory[places] = x[inside].to(memory.dtype)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(torch.full(tuple(shape), torch.nan if dtype.is_floating_point else 0, dtype=dtype))


def _product(a: Any, b: Any, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Register:
    a, b = (x.tensor if isinstance(x, Shared) else x for x in (a, b))
    found = a.float() @ b.float()
    return register(found + acc if use_acc else found)


def _warp_specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    failures = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def _language(place: tuple[int, ...], grid: tuple[int, ...]) -> SimpleNamespace:
    """gl, as one block of a grid sees it."""

    def full(shape: list[int], value: float, dtype: torch.dtype, layout: Any = None) -> Register:
        return register(torch.full(tuple(shape), value, dtype=dtype))

    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("float32", "bfloat16", "int32", "int64", "exp2")},
        **dict.fromkeys(
            ("SwizzledSharedLayout", "SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout"),
            lambda *_: None,
        ),
        constexpr=lambda x: x,
        static_range=range,
        allocate_shared_memory=_allocate,
        program_id=lambda axis: register(torch.tensor(place[axis], dtype=torch.int32)),
        num_programs=lambda axis: grid[axis],
        arange=lambda start, end, layout: register(torch.arange(start, end, dtype=torch.int32)),
        full=full,
        zeros=lambda shape, dtype, layout: full(shape, 0, dtype),
        where=lambda condition, x, y: register(torch.where(condition, x, y)),
        minimum=min,
        cdiv=lambda x, y: -(-x // y),
        sum=lambda x, axis: x.sum(axis),
        associative_scan=lambda x, axis, combine: x.cumsum(axis),
        convert_layout=lambda x, layout: x,
        inline_asm_elementwise=lambda text, constraints, inputs, *_, **__: inputs[0],
        load=_load,
        store=_store,
        warp_specialize=_warp_specialize,
    )


def _rebuilt(function: JITFunction, known: dict[Any, Any], given: dict[str, Any]) -> Any:
    """The kernel's Python, and that of all it calls, with the names that it has of Gluon as given."""
    if function not in known:
        names: dict[str, Any] = {"__builtins__": __builtins__}
        known[function] = FunctionType(function.fn.__code__, names, function.__name__, function.fn.__defaults__)
        for name in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(name)
            if name in given:
                names[name] = given[name]
            elif isinstance(value, JITFunction):
                names[name] = _rebuilt(value, known, given)
            elif name in function.fn.__globals__:
                names[name] = value.value if isinstance(value, constexpr) else value
    return known[function]


def launch(
    kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any], warps: int, types: Any, registers: Any = None
) -> None:
    """In place of holdfast.kernels.common.gluon_launch.launch. What kernels write must hold NaN before."""

    def seen(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        return Tiles(x.base, x.block_shape) if hasattr(x, "block_shape") else x

    for place in ((x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])):
        barriers = Barriers()
        given = {
            "gl": _language(place, grid),
            "mbarrier": barriers,
            "barrier": lambda: None,
            "fence_async_shared": lambda: None,
            "mma_v2": _product,
            "tma_load": barriers.tma_load,
            "tma_store": _tma_store,
            "tma_store_wait": lambda pending: None,
            "warpgroup_mma": _product,
            "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else deps,
        }
        _rebuilt(kernel, {}, given)(*map(seen, arguments), **constants)
