"""Compiles Hopper's Gluon kernels for a GPU that is not there, as their launches would."""

import io
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

import partition_dispatch
from triton_compile import BOUNDED, bounded
from uniform_registers import disassembled, misread_stack_in, overwritten_in, spilled_in, unset_in

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """shared: bytes a block. spilled: bytes a thread, as `bounded`. notes: what the assembler remarks.

    reloaded: instructions for spilled registers in loops of products.
    """

    shared: int
    spilled: int
    notes: str
    ptx: str
    reloaded: list[str]
    cubin: bytes


class Recorded(Exception):
    """Carries a launch instead of running it."""

    def __init__(
        self, kernel: Any, arguments: Any, constants: dict[str, Any], warps: int, registers: int | None = None
    ) -> None:
        self.kernel, self.arguments, self.constants, self.warps = kernel, arguments, constants, warps
        self.registers = registers


def recorded(monkeypatch: Any, *modules: Any) -> list[Recorded]:
    """Keeps the launches of modules from running; the list that they will be found in."""
    launches: list[Recorded] = []

    def keep(
        kernel: Any,
        grid: Any,
        arguments: Any,
        constants: dict[str, Any],
        warps: int,
        types: Any,
        registers: Any = None,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        launches.append(Recorded(kernel, arguments, constants, warps, registers))

    for module in modules:
        monkeypatch.setattr(module, "launch", keep)
    return launches


def specialised(launch: Recorded) -> list[str]:
    """The names of numbers that a launch's kernel would be compiled for, which its launch does not look it up by."""
    given = zip(launch.kernel.params, launch.arguments, strict=False)
    return [x.name for x, value in given if isinstance(value, int) and not x.do_not_specialize]


def _type_of(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    if isinstance(argument, int | float):
        return "i32" if isinstance(argument, int) else "fp32"
    block = ", ".join(str(size) for size in argument.block_shape)
    return f"tensordesc<{TYPES[argument.base.dtype]}[{block}],{argument.layout!r}>"


def compile_launch(launch: Recorded, aligned: tuple[str, ...] = ()) -> Compiled:
    """Compiles for sm_90a what a recorded launch would run. aligned: pointers at multiples of 16 bytes, as launched."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    signature = {name: "constexpr" if name in launch.constants else _type_of(values[name]) for name in names}
    constants = {(names.index(name),): values[name] for name in names if signature[name] == "constexpr"}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if values.get(name) is not None}
    source = GluonASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "maxnreg": launch.registers}
    made, said = _compiled(source, options)
    sass = disassembled(made.asm["cubin"])
    dispatch = partition_dispatch.faults(made.asm["ptx"])
    for faults in (unset_in(sass), overwritten_in(sass), misread_stack_in(sass), dispatch):
        assert not (found := list(faults)), found
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled, said
    # of another Triton's compiler what is reloaded is as little bounded as what spills
    reloaded = list(spilled_in(sass)) if triton.__version__.startswith(BOUNDED) else []
    return Compiled(made.metadata.shared, bounded(int(spilled[1])), said, made.asm["ptx"], reloaded, made.asm["cubin"])


def _compiled(source: GluonASTSource, options: dict[str, Any]) -> tuple[Any, str]:
    """What Triton makes, and what its assembler says; a kernel from Triton's cache is assembled again for that."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if said := printed.getvalue():
        return made, said
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(made.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        return made, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def places_of_stores(ptx: str) -> list[int]:
    """Where in a block's shared memory each of a kernel's TMA stores begins, in its order."""
    sums = {made: (of, int(by)) for made, of, by in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)}

    def place(register: str) -> int:
        return sum_[1] + place(sum_[0]) if (sum_ := sums.get(register)) else 0

    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared\S* \[.*?\}\], \[(%r\d+)\];", ptx)
    return [place(register) for register in stores]
