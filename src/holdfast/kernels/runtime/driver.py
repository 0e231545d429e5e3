"""Compiled Triton kernels launched through the CUDA driver: Triton's own launch spends several times as long in Python.

A kernel's PTX says which parameters it has: the arguments are packed into them by one struct, and a tensor's descriptor
is encoded once for each address, shape and strides. Where the PTX has other parameters than the kernel's signature asks
for, as another version of Triton may arrange, Triton's own launch runs.

A kernel that was compiled with launch_pdl is launched as a programmatic dependent: its blocks may start while the
launch before it on the stream still runs, and it says itself what has to wait (griddepcontrol.wait). One that was
compiled with launch_cooperative_grid runs with all its blocks at once, or its launch fails.
"""

import ctypes
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from triton.runtime import driver

Run = Callable[[tuple[int, int, int], Sequence[Any], Iterable[Any]], None]

_ENTRY = re.compile(r"\.visible \.entry [^(]*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?")
_THREADS = re.compile(r"\.reqntid (\d+)")
_NUMBERS = {"i32": "i", "i64": "q", "fp32": "f"}
# of CUtensorMapDataType
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAP_BYTES, _MAP_ALIGNMENT, _L2_128_BYTES, _ADDRESS_BYTES = 128, 64, 2, 8
_INVALID_CONTEXT = 201
# CUlaunchConfig: grid, block, shared bytes, stream, attributes and how many; CUlaunchAttribute: id, value of 64 bytes
_CONFIG, _ATTRIBUTE = struct.Struct("=7I4xQQI4x"), struct.Struct("=I4xi60x")
_COOPERATIVE, _PROGRAMMATIC_SERIALIZATION = 2, 6
# addresses, shapes and strides that a descriptor argument has had
_MAX_DESCRIPTORS = 1024


@cache
def _cuda() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    word, number = ctypes.c_void_p, ctypes.c_uint
    cuda.cuLaunchKernel.argtypes = [word, *[number] * 7, word, word, word]
    cuda.cuLaunchKernelEx.argtypes = [word] * 4
    cuda.cuTensorMapEncodeTiled.argtypes = [word, number, number, *[word] * 5, *[number] * 4]
    return cuda


def _raise(status: int, what: str) -> None:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(status, ctypes.byref(text))
    raise RuntimeError(f"{what}: {text.value.decode() if text.value else f'CUDA error {status}'}")


def _enter(device: int) -> None:
    """Makes the device's context the thread's own: a thread has none before its first call of CUDA's."""
    context = ctypes.c_void_p()
    status = _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or _cuda().cuCtxSetCurrent(context)
    if status:
        _raise(status, f"entering the context of device {device}")


def launcher(compiled: Any) -> Run:
    """A function (grid, arguments, constants) that launches on the current stream of the device it was compiled for.

    arguments: in the kernel's order, with descriptors, tensors or their addresses, numbers, and None where a kernel was
    compiled for None; constants: the values of its constexpr parameters, which come last.
    """

    def triton_launch(grid: tuple[int, int, int], arguments: Sequence[Any], constants: Iterable[Any]) -> None:
        compiled[grid](*arguments, *constants)

    return DriverLauncher(compiled) if has_known_parameters(compiled) else triton_launch


def has_known_parameters(compiled: Any) -> bool:
    """Return whether the kernel's parameters are those that its signature asks for, as far as this file knows."""
    try:
        data = compiled.metadata
        plain = data.num_ctas == 1 and not (data.global_scratch_size or data.profile_scratch_size)
        _, declared = _entry(compiled.asm["ptx"])
        asked = [size for _, _, sizes in _arguments(compiled) for size, _ in sizes]
    except (AttributeError, KeyError, ValueError):
        return False
    # the last two are scratch memory's addresses
    return plain and declared == [*asked, 8, 8]


def _entry(ptx: str) -> tuple[int, list[int]]:
    """Threads of a block, and the bytes of each parameter."""
    entry = _ENTRY.search(ptx)
    threads = entry and _THREADS.search(entry[2])
    if not threads:
        raise ValueError("expected an entry that says how many threads it takes")
    sizes = [int(count) if count else int(bits) // 8 for bits, count in _PARAMETER.findall(entry[1])]
    return int(threads[1]), sizes


def _arguments(compiled: Any) -> list[tuple[int, dict[str, Any] | None, list[tuple[int, str]]]]:
    """Return of each argument that is passed its place, what Triton says of its descriptor, sizes and formats."""
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    found: list[tuple[int, dict[str, Any] | None, list[tuple[int, str]]]] = []
    for place, kind in enumerate(compiled.src.signature.values()):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            about = next(descriptors, None)
            if about is None or about["fp4_padded"]:
                raise ValueError(f"expected a descriptor for TMA; got {kind}")
            rank = len(about["block_size"])
            parts = [(_MAP_BYTES, f"{_MAP_BYTES}s"), *[(4, "i")] * rank, *[(8, "q")] * rank]
            found.append((place, about, parts))
        else:
            form = "Q" if kind.startswith("*") else _NUMBERS[kind]
            found.append((place, None, [(struct.calcsize(f"={form}"), form)]))
    return found


class DriverLauncher:
    """Launches one kernel. places: of each argument that is passed its place, and its cache of descriptors."""

    def __init__(self, compiled: Any) -> None:
        data = compiled.metadata
        self.name, self.shared = compiled.name, data.shared
        self.device, self.stream_of = driver.active.get_current_device(), driver.active.get_current_stream
        most = driver.active.utils.get_device_properties(self.device)["max_shared_mem"]
        if self.shared > most:
            # the driver would call it an invalid argument of the launch
            raise RuntimeError(f"{self.name}: a block takes {self.shared} bytes of shared memory; this GPU has {most}")
        # Triton's own loading, but for a launcher in C, which takes a quarter of a second to compile
        _, self.function, *_ = driver.active.utils.load_binary(self.name, compiled.kernel, self.shared, self.device)
        self.cuda_launch = _cuda().cuLaunchKernel
        asked = (_PROGRAMMATIC_SERIALIZATION, data.launch_pdl), (_COOPERATIVE, data.launch_cooperative_grid)
        self.attributes = b"".join(_ATTRIBUTE.pack(attribute, 1) for attribute, is_asked in asked if is_asked)
        self.threads, _ = _entry(compiled.asm["ptx"])
        arguments = _arguments(compiled)
        self.places = [(place, None if about is None else TmaDescriptorCache(about)) for place, about, _ in arguments]
        form, self.starts, size = ["="], [], 0
        for width, letter in (part for *_, parts in arguments for part in parts):
            alignment = _MAP_ALIGNMENT if width == _MAP_BYTES else width
            form.append(f"{-size % alignment}x{letter}")
            size += -size % alignment
            self.starts.append(size)
            size += width
        self.form = struct.Struct("".join(form))
        self.spare: list[tuple[Any, int, Any]] = []

    def __call__(self, grid: tuple[int, int, int], arguments: Sequence[Any], constants: Iterable[Any]) -> None:
        values: list[Any] = []
        for place, tiles in self.places:
            x = arguments[place]
            if tiles is not None:
                values += tiles(x)
            else:
                values.append(x.data_ptr() if isinstance(x, torch.Tensor) else x)
        self.start(grid, values)

    def start(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Launches with parameters of these values: numbers, addresses, maps' bytes. Raises RuntimeError."""
        # threads may launch at once, so that each needs a block of its own
        try:
            block = self.spare.pop()
        except IndexError:
            block = self._block()
        buffer, first, addresses = block
        self.form.pack_into(buffer, first, *values)
        try:
            self._launch(grid, addresses)
        finally:
            self.spare.append(block)

    def bound(self, grid: tuple[int, int, int], values: Sequence[Any]) -> Callable[[], None]:
        """The launch with these values, to be started any number of times, by several threads if need be."""
        buffer, first, addresses = self._block()
        self.form.pack_into(buffer, first, *values)
        addresses.buffer = buffer
        return partial(self._launch, grid, addresses)

    def _launch(self, grid: tuple[int, int, int], addresses: Any) -> None:
        launch = self._attributed if self.attributes else self._plain
        status = launch(grid, addresses)
        if status == _INVALID_CONTEXT:
            _enter(self.device)
            status = launch(grid, addresses)
        if status and math.prod(grid):
            _raise(status, f"launching {self.name}")

    def _plain(self, grid: tuple[int, int, int], addresses: Any) -> int:
        stream = self.stream_of(self.device)
        return self.cuda_launch(self.function, *grid, self.threads, 1, 1, self.shared, stream, addresses, None)

    def _attributed(self, grid: tuple[int, int, int], addresses: Any) -> int:
        attributes, count = ctypes.create_string_buffer(self.attributes), len(self.attributes) // _ATTRIBUTE.size
        stream = self.stream_of(self.device)
        how = (*grid, self.threads, 1, 1, self.shared, stream, ctypes.addressof(attributes), count)
        config = ctypes.create_string_buffer(_CONFIG.pack(*how))
        return _cuda().cuLaunchKernelEx(config, self.function, addresses, None)

    def _block(self) -> tuple[Any, int, Any]:
        """Memory for the parameters, where in it they begin, and the address of each, as the driver takes them."""
        buffer = ctypes.create_string_buffer(self.form.size + _MAP_ALIGNMENT)
        start = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
        # two more for scratch memory, of which there is none
        nothing = ctypes.c_void_p()
        first = ctypes.addressof(buffer) + start
        places = [first + offset for offset in self.starts] + [ctypes.addressof(nothing)] * 2
        addresses = (ctypes.c_void_p * len(places))(*places)
        addresses.nothing = nothing
        return buffer, start, addresses


class TmaDescriptorCache:
    """A descriptor argument's parameters: a map for TMA, shape and strides."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, x: Any) -> tuple[Any, ...]:
        address = x.base.data_ptr()
        key = (address, x.shape, x.strides)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _MAX_DESCRIPTORS:
                self.known.clear()
            found = self.known[key] = (self.encoder(x)(address), *x.shape, *x.strides)
        return found

    def encoder(self, x: Any) -> Callable[[int], bytes]:
        """Return a function from an address to the map of a tensor there with x's dtype, shape and strides."""
        rank, width, dtype = len(x.shape), self.about["elem_size"], _ELEMENTS[x.base.dtype]
        shape = (ctypes.c_uint64 * rank)(*reversed(x.shape))
        strides = (ctypes.c_uint64 * (rank - 1))(*(width * stride for stride in reversed(x.strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(self.about["block_size"]))
        steps, swizzle = (ctypes.c_uint32 * rank)(*[1] * rank), self.about["swizzle"]

        def encode(address: int) -> bytes:
            space = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
            start = -ctypes.addressof(space) % _MAP_ALIGNMENT
            how = (
                ctypes.addressof(space) + start, dtype, rank, address,
                shape, strides, box, steps, 0, swizzle, _L2_128_BYTES, 0,
            )  # fmt: skip
            status = _cuda().cuTensorMapEncodeTiled(*how)
            if status == _INVALID_CONTEXT:
                _enter(torch.cuda.current_device())
                status = _cuda().cuTensorMapEncodeTiled(*how)
            if status:
                _raise(status, f"a descriptor of tiles {list(box)[::-1]} in {list(shape)[::-1]}")
            return space[start : start + _MAP_BYTES]

        return _MapEncoder(encode)


class _MapEncoder:
    """From an address to a map, by the driver until two maps are seen to differ in the address that they begin with."""

    def __init__(self, encode: Callable[[int], bytes]) -> None:
        self.encode = encode
        # a first address and what follows it in its map; whether that follows a second too, None before there is one
        self.first, self.rest = 0, b""
        self.is_known: bool | None = None

    def __call__(self, address: int) -> bytes:
        # the driver refuses others
        if self.is_known and address % 16 == 0:
            return address.to_bytes(_ADDRESS_BYTES, "little") + self.rest
        found = self.encode(address)
        if not self.rest:
            self.first, self.rest = address, found[_ADDRESS_BYTES:]
        elif self.is_known is None and address != self.first:
            self.is_known = found == address.to_bytes(_ADDRESS_BYTES, "little") + self.rest
        return found
