"""What ptxas of CUDA 12.8 gets wrong about the registers of wgmma, and what it spills around it, found in what it made.

Uniform registers that a kernel reads and never sets: of descriptors some are forgotten. Registers that a product still
reads while the kernel writes to them: where a branch lies between a product and the wait for it, ptxas takes its first
operand's registers for free. The stack's pointer in the place of a descriptor's part, where registers are short. Such a
kernel gives wrong numbers or faults; nothing else tells before it runs. See docs/notes/compilers.md#ptxas.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# opcodes whose first operand, where it is a uniform register, is written
_WRITES = ("U", "R2UR", "S2UR", "CS2UR", "LDCU", "REDUX", "VOTEU")
_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*)")
_STACK = re.compile(r"[-~|]*R1(?:\.reuse)?\|?")
_COMMENT, _COMMA = re.compile(r"/\*.*?\*/"), re.compile(r",\s*")
_USE = re.compile(r"(gdesc\[|desc\[|)UR(\d+)(\.64)?")


def disassembled(cubin: bytes) -> str:
    """What nvdisasm prints of a kernel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        # without a search for where indirect branches may go, which takes a quarter of the time and is not read
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unset_uniform_registers(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which none before them, in the order of the text, writes."""
    return list(unset_in(disassembled(cubin)))


@lru_cache(maxsize=1)
def _instructions(sass: str) -> list[tuple[str, str, list[str]]]:
    """Of each its text, opcode and operands; kept for the next who looks for faults in the same kernel."""
    made = []
    for line in sass.splitlines():
        code = _COMMENT.sub("", line).strip().removesuffix(";").strip()
        found = _INSTRUCTION.fullmatch(code)
        if found:
            made.append((code, found[1], _COMMA.split(found[2])))
    return made


def unset_in(sass: str) -> Iterator[str]:
    """unset_uniform_registers of what nvdisasm prints."""
    known: set[int] = set()
    for code, opcode, operands in _instructions(sass):
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


# results that are wider than one register; what stores, jumps or waits writes to none
_WIDTHS = ((".M88.4", 4), (".128", 4), (".64", 2), (".WIDE", 2), ("CS2R", 2), (".M88.2", 2))
_WRITES_NONE = ("ST", "RED", "BAR", "BRA", "MEMBAR", "WARPSYNC", "SYNCS.ARRIVE", "UTMA")


def overwritten_in(sass: str) -> Iterator[str]:
    """Instructions that write to a register which a product that may still run reads as its first operand.

    sass: what nvdisasm prints, taken in the order of the text.
    """
    # registers that products read, by groups that are waited for; the last is still being made
    groups: list[set[int]] = [set()]
    for code, opcode, operands in _instructions(sass):
        if opcode.startswith("HGMMA"):
            first = re.fullmatch(r"R(\d+)", operands[1])
            if first:
                groups[-1] |= set(range(int(first[1]), int(first[1]) + 4))
            if operands[-1] == "gsb0":
                groups.append(set())
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            groups = groups[len(groups) - 1 - int(operands[-1], 16) :] if len(groups) > 1 else groups
        else:
            result = re.fullmatch(r"R(\d+)(?:\.reuse)?", operands[0])
            if result and not opcode.startswith(_WRITES_NONE):
                width = next((count for part, count in _WIDTHS if part in opcode), 1)
                if any(not group.isdisjoint(range(int(result[1]), int(result[1]) + width)) for group in groups):
                    yield code


def misread_stack_in(sass: str) -> Iterator[str]:
    """Instructions of what nvdisasm prints that compute with the stack's pointer, R1, as if it were another number.

    It is an address of spilled registers and nothing else: no kernel has arrays there.
    """
    for code, _, operands in _instructions(sass):
        if "R1" in code and operands[0] != "R1" and any(map(_STACK.fullmatch, operands[1:])):
            yield code


def spilled_in(sass: str) -> Iterator[str]:
    """Loads and stores of spilled registers in loops that hold products, in what nvdisasm prints.

    Each costs a sweep some 10 us of 250 on an H200: shared memory leaves no L1 cache, so that it goes to L2. What a
    branch back spans is a loop, if no launch of warps is.
    """
    lines = sass.splitlines()
    labels = {line.strip().removesuffix(":"): number for number, line in enumerate(lines) if line.strip().endswith(":")}
    found: dict[int, str] = {}
    for number, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?`\((\S+)\)", line)
        first = labels.get(target[1], number) if target else number
        loop = "\n".join(lines[first:number])
        if "HGMMA" in loop and "USETMAXREG" not in loop:
            found |= {n: lines[n].strip() for n in range(first, number) if re.search(r"\b(LDL|STL)\b", lines[n])}
    return iter(found.values())
