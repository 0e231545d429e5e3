"""CUDA C++ compiled by NVRTC: no nvcc and no extension build on a user's machine, and each source compiled once.

Cubins are saved on disk by a hash of all that decides them, so the second process to need one loads it.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from holdfast.kernels.runtime.replay.recording import RECORDING, mark_unrecordable, note_launch

from .compile_pool import get_or_compile, is_dry_run
from .torch_private import current_device, stream_of
from .watching import WATCHERS, watched


def missing(capability: tuple[int, int] | None = None) -> str | None:
    """Why CUDA C++ cannot be compiled here, for a compute capability or at all, or None."""
    try:
        _, nvrtc = _bindings()
        known = _check(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    except (ImportError, RuntimeError) as error:
        # the bindings import without the library that they load at their first call
        return f"needs NVRTC through cuda-bindings (pip install 'holdfast[cuda]'): {error}"
    if capability is not None and (wanted := 10 * capability[0] + capability[1]) not in known:
        return f"the installed NVRTC does not know sm_{wanted}; it knows up to sm_{max(known)}"
    return None


@cache
def _bindings() -> tuple[Any, Any]:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call's result. Raises RuntimeError with the library's own words for an error."""
    driver, nvrtc = _bindings()
    error, *values = result
    if int(error) != 0:
        if isinstance(error, nvrtc.nvrtcResult):
            _, text = nvrtc.nvrtcGetErrorString(error)
        else:
            _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{what}: {text.decode() if text else error}")
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code. log: what the compiler said of registers and spills; empty when the code came from disk."""

    code: bytes
    log: str


# bytes of the hash before the machine code in a saved file
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Where cubins are saved; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "holdfast" / "cubins"
    except RuntimeError:
        return None


def compile_source(source: str, arch: str, options: Sequence[str] = (), store: Path | None = None) -> Cubin:
    """Compiles CUDA C++ for an architecture such as "sm_90a", or finds what an earlier call compiled.

    store: the folder of saved cubins; None compiles anew and saves none. Raises RuntimeError with the compiler's log.
    """
    _, nvrtc = _bindings()
    version = _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "--diag-suppress=177", *options]
    key = hashlib.sha256("\0".join([source, *flags, *map(str, version)]).encode()).hexdigest()
    path = None if store is None else store / f"{key}.cubin"
    if path is not None and (found := _saved_code(path)) is not None:
        return Cubin(found, "")
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"holdfast.cu", 0, [], []), "nvrtcCreateProgram")
    try:
        texts = [flag.encode() for flag in [*flags, "--ptxas-options=-v"]]
        result = nvrtc.nvrtcCompileProgram(program, len(texts), texts)
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        _check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        said = log.rstrip(b"\0 ").decode(errors="replace")
        if int(result[0]) != 0:
            raise RuntimeError(f"NVRTC could not compile for {arch}:\n{said}")
        code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if path is not None:
        _save_code(path, code)
    return Cubin(code, said)


def _saved_code(path: Path) -> bytes | None:
    """The machine code of a file, which its hash precedes; None where there is none, or not as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _save_code(path: Path, code: bytes) -> None:
    """Writes beside the place and renames: another process sees the whole file or none."""
    # a home that cannot be written to, or is full, costs a compile each process, no more
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function on one device. library keeps its code loaded."""

    name: str
    function: Any
    library: Any

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        arguments: Sequence[Any],
        cooperative: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Runs on the current stream. arguments: tensors and None as pointers, ctypes numbers as themselves.

        cooperative: all blocks run at once, or the launch fails. first: called before it, replayed or not. Raises
        RuntimeError with the driver's words.
        """
        # compile_pool.py wants kernels made, not run
        if is_dry_run():
            return
        given = [x if isinstance(x, torch.Tensor) else _word(x) for x in arguments]
        how = Launch(self, threads, shared, cooperative, first, len(given))
        note_launch(how, grid, given)
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
        if WATCHERS:
            watched(self.name, given, lambda: how.start(grid, values))
            return
        how.start(grid, values)

    def repeated(self, threads: int, pointers: int, numbers: int) -> Callable[..., None]:
        """A function (blocks, tensors, *numbers) that launches on what is now the current stream, in little host time.

        pointers, numbers: how many of each; numbers are 64-bit integers. For one host thread at a time.
        """
        # a recording would have to see every one
        mark_unrecordable()
        driver, _ = _bindings()
        values = (ctypes.c_int64 * (pointers + numbers))()
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        stream = driver.CUstream(_stream())
        start, function = driver.cuLaunchKernel, self.function

        def run(blocks: int, tensors: Sequence[Any], *rest: int) -> None:
            if WATCHERS:
                watched(self.name, tensors, lambda: begin(blocks, tensors, *rest))
                return
            begin(blocks, tensors, *rest)

        def begin(blocks: int, tensors: Sequence[Any], *rest: int) -> None:
            values[:] = [*[x.data_ptr() for x in tensors], *rest]
            given = function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(places), 0
            result = start(*given)
            if int(result[0]) != 0:
                _check(_in_context(result, start, *given), f"launching {self.name}")

        return run


def _stream() -> int:
    """The current stream of the current device, as the driver takes it."""
    return stream_of(current_device())


def _in_context(result: tuple[Any, ...], call: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, None]:
    """(the error of a driver's call, None), the call repeated where its thread had no context yet.

    PyTorch gives a thread one at its first work on a device: what autograd's threads begin with may be ours.
    """
    driver, _ = _bindings()
    if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        _enter_context(torch.cuda.current_device())
        result = call(*arguments)
    return result[0], None


def _enter_context(device: int) -> None:
    """Makes the context that PyTorch works in the thread's current one."""
    driver, _ = _bindings()
    handle = _check(driver.cuDeviceGet(device), "cuDeviceGet")
    context = _check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
    _check((driver.cuCtxSetCurrent(context)[0], None), "cuCtxSetCurrent")


def _word(x: Any) -> int:
    """None, or a ctypes number, as it lies in memory."""
    return 0 if x is None else int.from_bytes(bytes(x), "little")


class Launch:
    """A kernel and how it is launched; a replay may start it again, on other addresses. places: of its arguments."""

    def __init__(
        self,
        kernel: Kernel,
        threads: int,
        shared: int,
        cooperative: bool,
        first: Callable[[], None] | None,
        count: int,
    ) -> None:
        self.kernel, self.threads, self.shared, self.cooperative = kernel, threads, shared, cooperative
        self.first = first
        self.places = [(place, None) for place in range(count)]

    def start(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """values: a 64-bit word for each argument; a shorter one is its lowest bytes."""
        self.bound(grid, values)()

    def bound(self, grid: tuple[int, int, int], values: Sequence[Any]) -> Callable[[], None]:
        """The launch with these values, to be started any number of times, by several threads if need be."""
        driver, _ = _bindings()
        words = (ctypes.c_uint64 * len(values))(*values)
        begin = ctypes.addressof(words)
        places = (ctypes.c_void_p * len(values))(*range(begin, begin + 8 * len(values), 8))
        # what holds the memory that the driver reads
        places.words = words
        start = driver.cuLaunchCooperativeKernel if self.cooperative else driver.cuLaunchKernel
        before = self.kernel.function, *grid, self.threads, 1, 1, self.shared
        rest = () if self.cooperative else (0,)

        def run() -> None:
            if self.first is not None:
                self.first()
            given = *before, driver.CUstream(_stream()), ctypes.addressof(places), *rest
            result = start(*given)
            if int(result[0]) != 0:
                _check(_in_context(result, start, *given), f"launching {self.kernel.name}")

        return run


# by source, architecture and options
_CUBINS: dict[tuple[Any, ...], Cubin] = {}


def is_made(source: str, arch: str, options: tuple[str, ...] = ()) -> bool:
    """True once the machine code is there. False in a dry run of a call, which has a thread compile it."""
    key = (source, arch, options)
    if key not in _CUBINS:
        given = compile_source, source, arch, options, folder()
        cubin = get_or_compile(key, lambda: compile_source(*given[1:]), lambda: given, bool(RECORDING))
        if cubin is None:
            return False
        _CUBINS[key] = cubin
    return True


@lru_cache(maxsize=256)
def _library(source: str, arch: str, device: int, options: tuple[str, ...]) -> Any:
    """The machine code of all functions of a source, in the current context, that of the device."""
    driver, _ = _bindings()
    cubin = _CUBINS.get((source, arch, options)) or compile_source(source, arch, options, folder())
    return _check(driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0), "loading machine code")


@lru_cache(maxsize=256)
def load(source: str, arch: str, name: str, shared: int, device: int, options: tuple[str, ...] = ()) -> Kernel:
    """The function of that name, ready to be launched with so many bytes of dynamic shared memory on a device."""
    driver, _ = _bindings()
    with torch.cuda.device(device):
        torch.cuda.init()
        _enter_context(device)
        library = _library(source, arch, device, options)
        kernel = _check(driver.cuLibraryGetKernel(library, name.encode()), f"finding {name}")
        function = _check(driver.cuKernelGetFunction(kernel), f"finding {name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = driver.cuFuncSetAttribute(function, limit, shared)
        _check((result[0], None), f"{shared} bytes of shared memory for {name}")
    return Kernel(name, function, library)
