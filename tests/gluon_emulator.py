"""Runs Gluon kernels on the CPU: their Python as it stands, with PyTorch in place of Gluon's operations.

What a kernel computes, where it reads and writes and in which order is checked; layouts, threads and barriers between
them are not. Copies into shared memory are as late as they may be, at the wait for them, and their destination holds
NaN until then, and beyond that where they are masked; with early=True they are there as soon as they start, over
whatever was still to be read.
"""

import builtins
import math
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

_DTYPES = {
    torch.float16: 16,
    torch.bfloat16: 16,
    torch.float32: 32,
    torch.float64: 64,
    torch.int16: 16,
    torch.int32: 32,
    torch.int64: 64,
    torch.bool: 8,
}


class DType:
    """A scalar type; of a pointer, element_ty is what it points to."""

    def __init__(self, torch_dtype: torch.dtype, pointer: bool = False) -> None:
        self.torch, self.primitive_bitwidth = torch_dtype, _DTYPES[torch_dtype]
        if pointer:
            self.element_ty = DType(torch_dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and self.torch == other.torch

    def __hash__(self) -> int:
        return hash(self.torch)


def _raw(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


class Value:
    """A tensor of a kernel, or a scalar."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> DType:
        return DType(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: DType, bitcast: bool = False) -> "Value":
        if bitcast:
            return Value(self.data.contiguous().view(dtype.torch))
        return self if self.data.dtype == dtype.torch else Value(self.data.to(dtype.torch))

    def permute(self, order: tuple[int, ...]) -> "Value":
        return Value(self.data.permute(order))

    def __getitem__(self, key: Any) -> "Value":
        return Value(self.data[key])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> "Value":
        return Value(-self.data)

    def __invert__(self) -> "Value":
        return Value(~self.data)


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def run(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        result = getattr(self.data, name)(_raw(other))
        return result if result is NotImplemented else Value(result)

    return run


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"]:
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ["add", "sub", "mul", "truediv", "and", "or"]:
    setattr(Value, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ["lt", "le", "gt", "ge", "eq", "ne"]:
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    """Elements of a tensor's storage: one, or a tensor of them."""

    def __init__(self, storage: torch.Tensor, offset: Any) -> None:
        self.storage, self.offset = storage, offset

    @staticmethod
    def of(x: torch.Tensor) -> "Pointer":
        size = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(torch.as_strided(x.detach(), (size,), (1,), 0), x.storage_offset())

    @property
    def dtype(self) -> DType:
        return DType(self.storage.dtype, pointer=True)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.storage, self.offset + _raw(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pointer":
        return Pointer(self.storage, self.offset - _raw(other))


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    offset = torch.as_tensor(pointer.offset)
    live = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(_raw(mask))
    offset, live = torch.broadcast_tensors(offset, live)
    # out of bounds is an error here, as it is not on a GPU
    found = pointer.storage[torch.where(live, offset, 0)]
    return Value(torch.where(live, found, torch.as_tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, data = torch.broadcast_tensors(torch.as_tensor(pointer.offset), _raw(value))
    if mask is not None:
        live = torch.as_tensor(_raw(mask)).expand(offset.shape)
        offset, data = offset[live], data[live]
    pointer.storage[offset] = data.to(pointer.storage.dtype)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> DType:
        return DType(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < self.data.shape[0]
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def reinterpret(self, dtype: DType, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.data.view(-1).view(dtype.torch)[: math.prod(shape)].view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data.expand(self.data.shape))

    def _keep_alive(self) -> None:
        """Memory here has no other use."""


class _Barrier:
    """What an mbarrier is waited for: copies that announce their bytes to it, phase after phase."""

    def __init__(self) -> None:
        self.expected, self.copies, self.phase = 0, [], 0


class _Barriers:
    """mbarrier, and the copies by TMA that arrive there; the barriers of an array by their place in it."""

    def __init__(self, early: bool) -> None:
        self.early, self.found = early, {}

    MBarrierLayout = staticmethod(lambda: None)

    def _of(self, at: Shared) -> _Barrier:
        return self.found[at.data.data_ptr()]

    def init(self, at: Shared, count: int) -> None:
        self.found[at.data.data_ptr()] = _Barrier()

    def expect(self, at: Shared, size: int) -> None:
        assert self._of(at).expected == 0, "a phase is under way"
        self._of(at).expected = size

    def load(self, source: "Described", place: list[Any], at: Shared, tile: Shared) -> None:
        barrier, place = self._of(at), [int(_raw(x)) for x in place]
        tile.data.fill_(math.nan)
        barrier.copies.append(lambda: tile.data.copy_(source.read(place)))
        barrier.expected -= source.block_type.nbytes
        if self.early:
            barrier.copies[-1]()

    def wait(self, at: Shared, parity: Any) -> None:
        barrier = self._of(at)
        assert int(_raw(parity)) == barrier.phase, "the wait is for another phase"
        assert barrier.copies, "nothing was copied"
        assert barrier.expected == 0, "bytes were announced that do not come"
        for copy in barrier.copies if not self.early else []:
            copy()
        barrier.copies, barrier.phase = [], 1 - barrier.phase


class Described:
    """A tensor behind a TMA descriptor: zeros are read beyond it, and nothing is written there."""

    def __init__(self, descriptor: Any) -> None:
        self.base, block = descriptor.base.detach(), list(descriptor.block_shape)
        self.dtype, self.layout = DType(self.base.dtype), None
        size = math.prod(block) * self.base.element_size()
        self.block_type = types.SimpleNamespace(shape=block, nbytes=size)

    def _there(self, place: list[int]) -> tuple[slice, ...]:
        spans = zip(place, self.block_type.shape, self.base.shape, strict=True)
        return tuple(slice(start, min(start + size, end)) for start, size, end in spans)

    def read(self, place: list[int]) -> torch.Tensor:
        found = self.base[self._there(place)]
        whole = torch.zeros(self.block_type.shape, dtype=self.base.dtype)
        whole[tuple(slice(0, n) for n in found.shape)] = found
        return whole

    def write(self, place: list[Any], tile: Shared) -> None:
        there = self.base[self._there([int(_raw(x)) for x in place])]
        there.copy_(tile.data[tuple(slice(0, n) for n in there.shape)])


def multiply(a: Any, b: Any, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    """warpgroup_mma."""
    found = a.data.float() @ b.data.float()
    return Value(found + acc.data if use_acc else found)


def multiply_wait(count: int, deps: tuple[Any, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def scan(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    """associative_scan of a vector."""
    found = [x[0]]
    for i in builtins.range(1, x.shape[0]):
        found.append(combine(found[-1], x[i]))
    return Value(torch.stack([value.data for value in found]))


def _absent(tile: Shared) -> float:
    """What a tile holds that has not been copied, or was masked."""
    return math.nan if tile.data.is_floating_point() else -1


class _Copies:
    """Asynchronous copies, in groups."""

    def __init__(self, early: bool) -> None:
        self.early, self.open, self.groups = early, [], []

    def copy(self, tile: Shared, pointer: Pointer, mask: Any = None) -> None:
        if self.early:
            tile.store(load(pointer, mask, _absent(tile)))
            return
        tile.data.fill_(_absent(tile))
        self.open.append((tile, pointer, mask))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for tile, pointer, mask in self.groups.pop(0):
                tile.store(load(pointer, mask, _absent(tile)))


class _Language(types.SimpleNamespace):
    """Stands for gl and tl."""

    def __init__(self, program: int, warps: int) -> None:
        def folded(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
            return lambda *values: Value(function(*(torch.as_tensor(_raw(value)) for value in values)))

        super().__init__(
            # what Triton's constexpr wraps is a plain value here
            constexpr=lambda x: x,
            arange=lambda start, stop, layout=None: Value(torch.arange(start, stop)),
            zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype.torch)),
            full=lambda shape, value, dtype, layout=None: Value(torch.full(shape, value, dtype=dtype.torch)),
            allocate_shared_memory=lambda dtype, shape, layout: Shared(
                torch.full(shape, math.nan if dtype.torch.is_floating_point else -1, dtype=dtype.torch)
            ),
            program_id=lambda axis: Value(torch.tensor(program if axis == 0 else 0)),
            num_warps=lambda: warps,
            static_range=range,
            load=load,
            store=store,
            where=lambda c, x, y: Value(torch.where(torch.as_tensor(_raw(c)), _raw(x), _raw(y))),
            sum=lambda x, axis: Value(x.data.sum(axis)),
            cdiv=lambda x, y: (x + (y - 1)) // y,
            associative_scan=scan,
            convert_layout=lambda x, layout, assert_trivial=False: x,
            reshape=lambda x, shape: Value(x.data.reshape(shape)),
            split=lambda x: tuple(Value(part) for part in x.data.unbind(-1)),
            join=lambda x, y: Value(torch.stack([x.data, y.data], -1)),
            abs=folded(torch.abs),
            exp=folded(torch.exp),
            exp2=folded(torch.exp2),
            floor=folded(torch.floor),
            minimum=folded(torch.minimum),
            maximum=folded(torch.maximum),
            inline_asm_elementwise=_assembly,
            fma=_fused,
            BlockedLayout=lambda *how: None,
            SliceLayout=lambda *how: None,
            SwizzledSharedLayout=lambda *how: None,
            NVMMASharedLayout=lambda *how: None,
            NVMMADistributedLayout=lambda *how: None,
            DotOperandLayout=lambda *how: None,
            **{str(dtype).removeprefix("torch."): DType(dtype) for dtype in _DTYPES},
        )


def _fused(x: Value, y: Any, z: Any) -> Value:
    product = x.data.double() * torch.as_tensor(_raw(y)).double()
    return Value((product + torch.as_tensor(_raw(z)).double()).to(x.data.dtype))


def _pair(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def packed(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return torch.stack([low, high], -1).to(dtype).view(torch.int32)[..., 0]

    return packed


_INSTRUCTIONS = {
    "neg.f32": torch.neg,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "cos.approx.ftz.f32": torch.cos,
    "sin.approx.ftz.f32": torch.sin,
    "cvt.rn.bf16x2.f32": _pair(torch.bfloat16),
    "cvt.rn.f16x2.f32": _pair(torch.float16),
}


def _assembly(text: str, constraints: str, values: list[Value], **how: Any) -> Value:
    return Value(_INSTRUCTIONS[text.split()[0]](*(x.data for x in values)))


def emulated_aggregate(made: Any, rebound: Callable[[Any], Any]) -> type:
    """The class that @aggregate made, with its constructor and methods rebound; Triton alone checks its fields."""
    # rebound when they are called: they may name the class that they belong to
    members = {member.fn.__name__: _later(member.fn, rebound) for member in made.hash_attrs}
    return type(made.__name__, (), members)


class Emulated:
    """A kernel to be launched as the original is."""

    def __init__(self, kernel: JITFunction, early: bool = False) -> None:
        self.kernel, self.early = kernel, early

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, maxnreg: int | None = None, **constants: Any) -> None:
            given = [_argument(x) for x in arguments]
            constants = {name: _typed(x) for name, x in constants.items()}
            for program in builtins.range(grid[0]):
                language, barriers, copies = _Language(program, num_warps), _Barriers(self.early), _Copies(self.early)
                modules = {"gl": language, "tl": language, "mbarrier": barriers, "reinterpret": Shared.reinterpret}
                modules |= {"async_copy": copies, "copy_to_shared": copies.copy}
                modules |= {
                    "tma_load": barriers.load,
                    "tma_store": Described.write,
                    "tma_store_wait": lambda count: None,
                }
                modules |= {"warpgroup_mma": multiply, "warpgroup_mma_wait": multiply_wait}
                modules |= dict.fromkeys(("barrier", "fence_async_shared"), lambda: None)
                rebinding(modules)(self.kernel.fn)(*given, **constants)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    return Described(x) if hasattr(x, "block_shape") else _typed(x)


def _typed(x: Any) -> Any:
    import triton.language as tl

    names = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}
    return DType(names[x]) if isinstance(x, tl.dtype) else x


def rebinding(modules: dict[str, Any]) -> Callable[[Any], Any]:
    """What gives a function, and those that it calls, other modules: each function once."""

    @cache
    def rebound(function: Any) -> Any:
        names = {}
        for name, value in function.__globals__.items():
            if name in modules:
                names[name] = modules[name]
            elif isinstance(value, JITFunction):
                names[name] = _later(value.fn, rebound)
            elif getattr(value, "__triton_aggregate__", False):
                names[name] = emulated_aggregate(value, rebound)
            else:
                names[name] = value.value if isinstance(value, constexpr) else value
        return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    return rebound


def _later(function: Any, rebound: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, rebound when it is called."""
    return lambda *arguments, **named: rebound(function)(*arguments, **named)
