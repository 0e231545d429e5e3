"""Takes the place of NVRTC and the driver: compiles a kernel's source with g++ and runs its threads as fibers."""

import ctypes
import hashlib
import re
import subprocess
from ctypes import c_float, c_int, c_long, c_longlong, c_uint, c_void_p
from pathlib import Path

import torch

HERE = Path(__file__).parent
# rounds of all fibers after which a kernel counts as stuck
PATIENCE = 2_000_000


def ptx() -> str:
    return (HERE / "ptx.h").read_text()


def host_source(source: str, name: str) -> str:
    """The kernel's source as C++ for the host, and a launcher that takes its arguments as an array of pointers."""
    source = source.replace(
        "extern __shared__ __align__(128) char shared[];", "char* shared = emulator::shared_memory();"
    )
    listed = re.search(rf"\n{name}\(([^)]*)\)", source)[1]
    kinds = [re.fullmatch(r"(.*?)\s*\w+", part.strip())[1] for part in listed.split(",")]
    given = ", ".join(f"*({kind}*)arguments[{k}]" for k, kind in enumerate(kinds))
    spaces = "\n".join(f"using namespace {space};" for space in re.findall(r"^namespace (\w+) {", source, re.MULTILINE))
    launcher = f"""
{spaces}
extern "C" int launch(int x, int y, int z, int threads, long shared, unsigned seed, long patience, void** arguments) {{
    dim3 grid;
    grid.x = x, grid.y = y, grid.z = z;
    return emulator::run(grid, threads, shared, seed, [=] {{ {name}({given}); }}, patience);
}}
"""
    return '#include "builtins.h"\n' + source + launcher


# What a precompiled header and those that include it have to agree on. A fortified longjmp refuses another stack.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE")


def compile_cpp(*arguments: object) -> None:
    done = subprocess.run(["g++", *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def prepare(folder: Path) -> None:
    """Leaves in the folder what kernels share: builtins.h and runtime.cpp, and what g++ made of them."""
    header, runtime = folder / "builtins.h", folder / "runtime.cpp"
    if not header.exists():
        for file in (header, runtime):
            file.write_text((HERE / file.name).read_text())
        compile_cpp("-x", "c++-header", header, "-o", f"{header}.gch")
        compile_cpp("-c", runtime, "-o", folder / "runtime.o")


class Emulated:
    """Stands for nvrtc.Kernel."""

    def __init__(self, source: str, name: str, folder: Path, seed: int) -> None:
        text = host_source(source, name)
        stem = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not stem.with_suffix(".so").exists():
            prepare(folder)
            stem.with_suffix(".cpp").write_text(text)
            compile_cpp("-shared", f"{stem}.cpp", folder / "runtime.o", "-o", f"{stem}.so")
        self.library, self.seed = ctypes.CDLL(str(stem.with_suffix(".so"))), seed

    def launch(self, grid, threads, shared, arguments, cooperative=False, first=None) -> None:
        if first is not None:
            first()
        values = [
            c_void_p(x.data_ptr() if isinstance(x, torch.Tensor) else None) if _points(x) else x for x in arguments
        ]
        places = (c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        sizes = [c_int(x) for x in (*grid, threads)]
        done = self.library.launch(*sizes, c_long(shared), c_uint(self.seed), c_long(PATIENCE), places)
        assert done, "the kernel's threads wait for one another for ever"

    def repeated(self, threads, pointers, numbers):
        def run(blocks, tensors, *rest):
            assert (len(tensors), len(rest)) == (pointers, numbers)
            self.launch((blocks, 1, 1), threads, 0, [*tensors, *map(c_longlong, rest)])

        return run


def _points(x: object) -> bool:
    return x is None or isinstance(x, torch.Tensor) or not isinstance(x, c_int | c_float | c_longlong | c_void_p)
