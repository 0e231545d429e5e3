"""Stands in for `mx.fast.metal_kernel` on a machine without Metal: mlx's own generated source, run on a CPU.

What mlx would hand to Apple's compiler is printed by its export tracing; here g++ compiles it behind `metal_on_cpu.h`.
Outputs start as NaN, with margins of NaN around every buffer. This checks what the kernels mean; Apple's compiler and
the speed of a GPU are beyond it.
"""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from .msl import Signature, generated_source, signature_of

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
# g++'s. Most kernels run a moment, for which it is not worth it to optimise them.
level = "-O0"
MARGIN = 64
NUMPY = {mx.float32: np.float32, mx.bfloat16: np.uint16, mx.float16: np.float16}
# where each Metal attribute comes from, for a fiber
ATTRIBUTES = {
    "thread_position_in_grid": "at.grid",
    "thread_position_in_threadgroup": "at.in_group",
    "threadgroup_position_in_grid": "at.group",
    "threadgroups_per_grid": "at.groups",
    "thread_index_in_simdgroup": "at.lane",
    "thread_index_in_threadgroup": "at.simdgroup * 32 + at.lane",
    "simdgroup_index_in_threadgroup": "at.simdgroup",
}


class ShimError(RuntimeError):
    """What the kernel did wrong: lanes that diverge, a write outside of a buffer."""


@dataclass(frozen=True)
class Launch:
    """One run of a kernel: its inputs and outputs by name, the generated source that Metal would compile."""

    kernel: str
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.array]
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


@dataclass
class Metal:
    """The stand-in. seed orders simdgroups and lanes; launches is what ran, or with runs=False what would have run."""

    seed: int = 0
    runs: bool = True
    launches: list[Launch] = field(default_factory=list)

    def metal_kernel(self, name, input_names, output_names, source, header=""):
        kernel = REAL_METAL_KERNEL(
            name=name, input_names=input_names, output_names=output_names, source=source, header=header
        )

        def call(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template=()):
            text = generated_source(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes)
            if self.runs:
                outputs = run(text, inputs, grid, threadgroup, output_shapes, output_dtypes, self.seed)
            else:
                outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            given, found = (dict(zip(*pair, strict=True)) for pair in ((input_names, inputs), (output_names, outputs)))
            self.launches.append(Launch(name.removeprefix("holdfast_"), given, found, text, grid, threadgroup))
            return outputs

        return call

    def named(self, kernel: str) -> list[Launch]:
        return [launch for launch in self.launches if launch.kernel == kernel]

    def allocated(self, *outputs: str) -> int:
        """Bytes of all outputs of these names."""
        return sum(x.nbytes for launch in self.launches for name, x in launch.outputs.items() if name in outputs)


REAL_METAL_KERNEL = mx.fast.metal_kernel


def run(text, inputs, grid, threadgroup, output_shapes, output_dtypes, seed) -> list[mx.array]:
    signature = signature_of(text)
    arrays = {name: _framed(x) for name, x in zip(signature.inputs, inputs, strict=True)}
    outputs = {
        name: _blank(shape, dtype)
        for name, shape, dtype in zip(signature.outputs, output_shapes, output_dtypes, strict=True)
    }
    placed = {name: array[MARGIN:] for name, array in (arrays | outputs).items()}
    shapes = {name: x.shape for name, x in zip(signature.inputs, inputs, strict=True)}
    execute(text, placed, shapes, grid, threadgroup, seed)
    found = []
    for name, shape, dtype in zip(signature.outputs, output_shapes, output_dtypes, strict=True):
        framed, blank = outputs[name].view(np.uint8), _blank(shape, dtype).view(np.uint8)
        edge = MARGIN * outputs[name].itemsize
        if (framed[:edge] != blank[:edge]).any() or (framed[-edge:] != blank[-edge:]).any():
            raise ShimError(f"{signature.name}: writes outside of {name}")
        inside = outputs[name][MARGIN:-MARGIN].reshape(shape)
        found.append(mx.array(inside).view(dtype) if dtype == mx.bfloat16 else mx.array(inside))
    return found


def execute(text, placed, shapes, grid, threadgroup, seed, first=(0, 0, 0)) -> None:
    """Runs the threadgroups from `first` on, on buffers that are placed already, by name."""
    signature = signature_of(text)
    buffers = [
        np.array(shapes[name.removesuffix("_shape")], np.int32) if name.endswith("_shape") else placed[name]
        for name in signature.buffers
    ]
    message = ctypes.create_string_buffer(512)
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    sizes = [(ctypes.c_int * 3)(*size) for size in (grid, threadgroup, first)]
    if _compiled(text, signature)(pointers, *sizes, seed, message):
        raise ShimError(f"{signature.name}: {message.value.decode()}")


def _framed(x: mx.array) -> np.ndarray:
    framed = _blank(x.shape, x.dtype)
    framed[MARGIN:-MARGIN] = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).reshape(-1)
    return framed


def _blank(shape, dtype: mx.Dtype) -> np.ndarray:
    kind = np.dtype(NUMPY[dtype])
    size = int(np.prod(shape)) + 2 * MARGIN
    return np.full(size * kind.itemsize, 0xFF, np.uint8).view(kind)


_libraries: dict[str, ctypes.CDLL] = {}
_folder = tempfile.TemporaryDirectory(prefix="holdfast-metal-")


def _compiled(text: str, signature: Signature):
    """The source as a function, compiled once in a session."""
    source = f'#include "metal_on_cpu.h"\n{signature.as_plain_function(text)}\n{_entry(signature)}'
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    if key not in _libraries:
        path = Path(_folder.name) / f"{key}.cpp"
        path.write_text(source)
        library = path.with_suffix(".so")
        # contraction off: the kernels say fma where they mean it
        flags = ["-std=c++17", level, "-fPIC", "-shared", "-w", "-ffp-contract=off", "-march=native", f"-I{HERE}"]
        done = subprocess.run([COMPILER, *flags, str(path), "-o", str(library)], capture_output=True, text=True)
        if done.returncode:
            raise ShimError(f"{signature.name} does not compile:\n{done.stderr[:4000]}")
        _libraries[key] = ctypes.CDLL(str(library))
    return _libraries[key].run


def _entry(signature: Signature) -> str:
    arguments = [
        f"*({kind}*)buffers[{i}]" if by_reference else f"({kind}*)buffers[{i}]"
        for i, (kind, by_reference) in enumerate(signature.kinds)
    ]
    arguments += [ATTRIBUTES[name] for name in signature.attributes]
    return (
        "static void **buffers;\n"
        f"static void enter(const shim::Place &at) {{ {signature.name}({', '.join(arguments)}); }}\n"
        'extern "C" int run(void **b, const int *grid, const int *group, const int *first,\n'
        "    unsigned seed, char *message) {\n  buffers = b;\n"
        "  return shim::launch(enter, grid, group, first, seed, message);\n}\n"
    )
