"""CUDA C++ compiled without a GPU: the kept machine code, and what is said when something is missing."""

import ctypes
import multiprocessing
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels.runtime import compile_pool as compiling
from holdfast.kernels.runtime import nvrtc

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=f"{nvrtc.missing()}")
SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'


@needs_nvrtc
def test_machine_code_is_kept_and_found_again(tmp_path):
    first = nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path)
    again = nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path)
    assert first.code == again.code
    assert "registers" in first.log
    assert again.log == ""
    assert len(list(tmp_path.iterdir())) == 1


@needs_nvrtc
def test_what_decides_the_code_decides_its_name(tmp_path):
    nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path)
    nvrtc.compile_source(SOURCE, "sm_80", store=tmp_path)
    nvrtc.compile_source(SOURCE.replace("2.0f", "3.0f"), "sm_90", store=tmp_path)
    nvrtc.compile_source(SOURCE, "sm_90", ["--use_fast_math"], store=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def compile_into(folder, barrier, queue):
    barrier.wait()
    queue.put(nvrtc.compile_source(SOURCE, "sm_90", store=folder).code)


@pytest.mark.slow
@needs_nvrtc
def test_processes_that_compile_at_once_agree(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=compile_into, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    codes = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(codes) == 1
    (saved,) = tmp_path.iterdir()
    assert nvrtc._saved_code(saved) in codes


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[:-40], lambda code: code[:-1] + b"x"])
def test_a_damaged_file_is_compiled_anew(tmp_path, damage):
    right = nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path).code
    (saved,) = tmp_path.iterdir()
    saved.write_bytes(damage(saved.read_bytes()))
    assert nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path).code == right
    assert nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path).log == ""


@needs_nvrtc
def test_a_file_that_cannot_be_read_costs_a_compile(tmp_path):
    nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path)
    (saved,) = tmp_path.iterdir()
    saved.unlink()
    saved.mkdir()
    assert nvrtc.compile_source(SOURCE, "sm_90", store=tmp_path).code
    # nor does what could not take its place stay behind
    assert list(tmp_path.iterdir()) == [saved]


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(nvrtc.Path, "home", no_home)
    assert nvrtc.folder() is None


@needs_nvrtc
def test_a_folder_that_cannot_be_written_costs_only_the_copy(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert nvrtc.compile_source(SOURCE, "sm_90", store=blocked / "cubins").code


@needs_nvrtc
def test_an_error_carries_the_compilers_words():
    with pytest.raises(RuntimeError, match=r"sm_90[\s\S]*undeclared_thing"):
        nvrtc.compile_source(SOURCE.replace("2.0f", "undeclared_thing"), "sm_90")


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc._bindings.cache_clear()
    try:
        assert "holdfast[cuda]" in nvrtc.missing()
    finally:
        nvrtc._bindings.cache_clear()


@needs_nvrtc
def test_an_architecture_that_the_compiler_does_not_know_is_said():
    assert nvrtc.missing((9, 0)) is None
    assert "does not know sm_990" in nvrtc.missing((99, 0))


def test_bindings_without_their_library_are_said(monkeypatch):
    class Unloadable:
        nvrtcResult = int

        @staticmethod
        def nvrtcGetSupportedArchs():
            raise RuntimeError("Failed to dlopen libnvrtc.so")

    monkeypatch.setattr(nvrtc, "_bindings", lambda: (None, Unloadable))
    assert "libnvrtc" in nvrtc.missing()


def driver_with(launch, **more):
    errors = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)
    words = {"CUstream": lambda at: at, "cuGetErrorString": lambda error: (0, b"no"), "CUresult": errors}
    return SimpleNamespace(cuLaunchKernel=launch, **words, **more)


@pytest.mark.parametrize("way", ["launch", "repeated"])
def test_a_thread_without_a_context_gets_pytorchs_and_launches_again(monkeypatch, way):
    """As autograd's thread, where a kernel of ours is the first work."""
    context = []
    driver = driver_with(
        lambda *given: (0 if context else 201,),
        cuDeviceGet=lambda device: (0, f"device {device}"),
        cuDevicePrimaryCtxRetain=lambda handle: (0, f"context of {handle}"),
        cuCtxSetCurrent=lambda made: (context.append(made) or 0,),
    )
    monkeypatch.setattr(nvrtc, "_bindings", lambda: (driver, SimpleNamespace(nvrtcResult=str)))
    monkeypatch.setattr(nvrtc, "_stream", lambda: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    kernel = nvrtc.Kernel("step", "it", None)
    for _ in range(2):
        if way == "launch":
            kernel.launch((1, 1, 1), 32, 0, [torch.zeros(1)])
        else:
            kernel.repeated(32, 1, 0)(1, [torch.zeros(1)])
    assert context == ["context of device 3"]


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_hands_over_pointers_and_numbers_and_is_noted(monkeypatch, cooperative):
    seen, noted, calls = [], [], []

    def start(function, *rest):
        places = rest[8]
        at = [ctypes.c_int64.from_address(places + 8 * k).value for k in range(4)]
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int)
        values = [kind.from_address(place).value for kind, place in zip(kinds, at, strict=True)]
        seen.append((function, rest[:8], values, len(rest) == 9))
        return (0,)

    driver = driver_with(start, cuLaunchCooperativeKernel=start)
    monkeypatch.setattr(nvrtc, "_bindings", lambda: (driver, SimpleNamespace(nvrtcResult=str)))
    monkeypatch.setattr(nvrtc, "_stream", lambda: 7)
    monkeypatch.setattr(nvrtc, "note_launch", lambda *given: noted.append(given))
    x = torch.zeros(3)
    arguments = [x, None, ctypes.c_float(-0.5), ctypes.c_int(-3)]
    nvrtc.Kernel("step", "it", None).launch((5, 2, 1), 64, 96, arguments, cooperative, lambda: calls.append(1))
    expected = ("it", (5, 2, 1, 64, 1, 1, 96, 7), [x.data_ptr(), None, -0.5, -3], cooperative)
    assert seen == [expected]
    ((how, grid, given),) = noted
    # as replay/replay.py starts it again, where a tensor has another address
    how.start(grid, [16, *given[1:]])
    assert seen[1] == (*expected[:2], [16, None, -0.5, -3], cooperative)
    assert [place for place, _ in how.places] == [0, 1, 2, 3]
    assert len(calls) == 2


def test_a_repeated_launch_hands_over_each_calls_own_arguments(monkeypatch):
    seen = []

    def launch(function, *rest):
        *sizes, places, _ = rest
        values = [
            ctypes.c_int64.from_address(ctypes.c_int64.from_address(places + 8 * k).value).value for k in range(4)
        ]
        seen.append((function, sizes, values))
        return (len(seen) == 3,)

    driver = driver_with(launch)
    monkeypatch.setattr(nvrtc, "_bindings", lambda: (driver, SimpleNamespace(nvrtcResult=str)))
    monkeypatch.setattr(nvrtc, "_stream", lambda: 7)
    run = nvrtc.Kernel("step", "it", None).repeated(256, 2, 2)
    x, y = torch.zeros(3), torch.zeros(4)
    run(5, [x, y], 2**40, 3)
    run(6, [y, x], 1, -1)
    assert seen == [
        ("it", [5, 1, 1, 256, 1, 1, 0, 7], [x.data_ptr(), y.data_ptr(), 2**40, 3]),
        ("it", [6, 1, 1, 256, 1, 1, 0, 7], [y.data_ptr(), x.data_ptr(), 1, -1]),
    ]
    with pytest.raises(RuntimeError, match="launching step: no"):
        run(5, [x, y], 1, 1)


def test_all_machine_code_of_a_first_call_is_made_at_one_time(monkeypatch):
    both, made = threading.Barrier(2), []

    def compile_source(source, arch, options, store):
        both.wait(20)
        made.append((source, arch, threading.get_ident()))
        return nvrtc.Cubin(b"", "")

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_CUBINS", {})
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 8)
    compiling._pool.cache_clear()
    asked = []

    def call(x):
        asked.append([nvrtc.is_made(source, "sm_90a") for source in ("forward", "backward")])
        return asked[-1]

    assert compiling.with_parallel_compile(call, (torch.zeros(1),), {}) == [True, True]
    # an attempt ends at the first of them; a dry run runs neither
    assert asked == [[False, False], [True, True]]
    assert sorted(given[:2] for given in made) == [("backward", "sm_90a"), ("forward", "sm_90a")]
    assert threading.get_ident() not in [thread for *_, thread in made]
    assert call(None) == [True, True]
    compiling._pool.cache_clear()
