"""Compiles Triton kernels for GPUs that are not there."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelined_buffers import raced
from uniform_registers import disassembled, misread_stack_in, unset_in

TARGETS = (80, 90, 100)


def over_targets(*sizes: Any) -> list[tuple[Any, ...]]:
    """Cases of (*size, capability): all sizes for sm_90, whose machine code is looked through, one for each other.

    sizes: tuples, or single values.
    """
    cases = [size if isinstance(size, tuple) else (size,) for size in sizes]
    others = [capability for capability in TARGETS if capability != 90]
    return [(*case, 90) for case in cases] + [
        (*cases[n % len(cases)], capability) for n, capability in enumerate(others)
    ]


# The compiler whose spills the tests bound. Any other has to compile the kernels, no more.
BOUNDED = "3.6."

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers: 32-bit, a thread. stack: bytes a thread that spilt or do not fit registers, as `bounded` has them.
    shared: bytes a block."""

    registers: int
    stack: int
    shared: int
    ttgir: str
    ptx: str


def compile_for(kernel: Any, capability: int, arguments: Mapping[str, Any], **options: int) -> Compiled:
    """Compiles a kernel of Triton or Gluon as a launch would; pointers and integers are taken for multiples of 16.

    arguments: by name; a torch dtype stands for a pointer to it, an int for an integer of 32 bits or of 64, a float for
    a float32; None and what the kernel declares constexpr are compiled in. options: num_warps and the like.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    from holdfast.kernels.runtime.assembler import newer_assembler

    constants = {
        name for name, parameter in zip(kernel.arg_names, kernel.params, strict=True) if parameter.is_constexpr
    }
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or value is None:
            signature[name], values[name] = "constexpr", value
        elif isinstance(value, torch.dtype):
            signature[name] = _POINTERS[value]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not kernel.params[place].do_not_specialize:
            signature[name], values[name] = "constexpr", 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not kernel.params[place].do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature, values, attributes)
    # lines of the source in the code are a tenth of what compiling takes, and nothing here reads them
    with knobs.compilation.scope(), nullcontext() if language is GluonASTSource else newer_assembler():
        knobs.compilation.disable_line_info = True
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if capability == 90:
        sass = disassembled(made.asm["cubin"])
        for faults in (unset_in(sass), misread_stack_in(sass), raced(made.asm["ttgir"])):
            assert not (found := list(faults)), found
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(registers, bounded(stack), made.metadata.shared, made.asm["ttgir"], made.asm["ptx"])


def bounded(spilt: int) -> int:
    """Bytes that spilt, or 0 if this is not the Triton whose spills the tests bound."""
    import triton

    return spilt if triton.__version__.startswith(BOUNDED) else 0


def _resources(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])
