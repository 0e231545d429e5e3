"""Uniform registers that a kernel reads and never sets: ptxas of CUDA 12.8 forgets some, of descriptors of wgmma.

Such a kernel gives wrong numbers or faults; nothing else tells before it runs. See docs/lab-notes.md.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# opcodes whose first operand, where it is a uniform register, is written
_WRITES = ("U", "R2UR", "S2UR", "CS2UR", "LDCU", "REDUX", "VOTEU")
_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*)")
_USE = re.compile(r"(gdesc\[|desc\[|)UR(\d+)(\.64)?")


def unset_uniform_registers(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which none before them, in the order of the text, writes."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(unset_in(sass))


def unset_in(sass: str) -> Iterator[str]:
    """unset_uniform_registers of what nvdisasm prints."""
    known: set[int] = set()
    for line in sass.splitlines():
        code = re.sub(r"/\*.*?\*/", "", line).strip().removesuffix(";").strip()
        found = _INSTRUCTION.fullmatch(code)
        if not found:
            continue
        opcode, rest = found.groups()
        operands = re.split(r",\s*", rest)
        written = re.fullmatch(r"UR(\d+)", operands[0]) if opcode.startswith(_WRITES) else None
        is_pair = opcode.startswith(("UIADD3.64", "ULDC.64", "LDCU.64", "UMOV.64")) or ".WIDE" in opcode
        read = set()
        for kind, number, wide in _USE.findall(", ".join(operands[1:] if written else operands)):
            first, count = int(number), 2 if kind or wide or opcode.startswith("UIADD3.64") else 1
            if kind == "gdesc[":
                # two descriptors; where the first operand is in registers, the first of them is not read
                in_memory = operands[1].startswith("gdesc[")
                first, count = (first, 4) if in_memory else (first + 2, 2)
            read |= set(range(first, first + count))
        if read - known:
            yield code
        known |= read
        if written:
            known |= set(range(int(written[1]), int(written[1]) + 1 + is_pair))
            if ".128" in opcode:
                known |= {int(written[1]) + 2, int(written[1]) + 3}
