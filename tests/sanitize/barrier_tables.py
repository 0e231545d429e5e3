"""Puts right what the assembler tells compute-sanitizer of a kernel's mbarriers, without a change to its instructions.

A cubin lists its mbarrier instructions (`EIATTR_MBARRIER_INSTR_OFFSETS` in `.nv.info.KERNEL`), and the tools watch what
is listed. Where `mbarrier.init` has its address in a register of the thread, ptxas 12.8 and 12.9 make a loop of it that
finds a uniform one, and list the NOP ahead of the loop. All warps run that, while one thread runs the instruction:
synccheck took it for an initialisation by each thread ("Already initialized. Invalidate before reinitializing.", by
threads of the warps that initialise nothing) and ended the kernel. So an entry of an initialisation that stands at a
NOP is given the place and the register of the instruction behind it that has its address.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from triton.runtime import driver

_LISTED = 0x39
# an attribute: format, number, and the size of what follows, if any does
_ATTRIBUTE = struct.Struct("<BBH")
_HAS_MORE = 4
# an entry: offset of the instruction; a register and a number whose sum is the address; kind; scope; a uniform register
_ENTRY = struct.Struct("<IIIBBBB")
_INITIALISES = 0
# instructions of sm_90: 16 bytes, of which the lowest 12 bits tell what it does
_WIDTH, _NOP, _EXCHANGE = 16, 0x918, 0x5B2
# the register that reads as 0
_NO_REGISTER = 0xFF


def put_right(cubin: bytes) -> tuple[bytes, list[tuple[str, int, int]]]:
    """The cubin, and kernel, place and right place of each entry that was wrong.

    One whose instruction is not found, and a cubin of another form, stay as they are.
    """
    made, moved = bytearray(cubin), []
    sections = _sections(cubin)
    for name, (begin, size) in sections.items():
        kernel = name.removeprefix(".nv.info.")
        code, length = sections.get(f".text.{kernel}", (0, 0))
        if kernel == name or not length:
            continue
        text = cubin[code : code + length]
        listed = {_ENTRY.unpack_from(cubin, at)[0] for at in _entries(cubin, begin, begin + size)}
        for at in _entries(cubin, begin, begin + size):
            place, _, number, kind, scope, _, last = _ENTRY.unpack_from(cubin, at)
            if kind != _INITIALISES or _does(text, place) != _NOP:
                continue
            right = next((x for x in range(place, length, _WIDTH) if _exchanges(text, x, number)), None)
            if right is not None and right not in listed:
                # as entries of instructions with a uniform register are
                _ENTRY.pack_into(made, at, right, _NO_REGISTER, number, kind, scope, text[right + 3], last)
                moved.append((kernel, place, right))
    return bytes(made), moved


@contextmanager
def with_right_tables() -> Iterator[dict[str, int]]:
    """Has Triton's kernels loaded with right tables; how many entries were wrong, by kernel."""
    utils, found = driver.active.utils, {}
    load = utils.load_binary

    def loading(name: str, cubin: bytes, *rest: object) -> object:
        right, moved = put_right(cubin)
        if moved:
            found[name] = max(len(moved), found.get(name, 0))
        return load(name, right, *rest)

    utils.load_binary = loading
    try:
        yield found
    finally:
        utils.load_binary = load


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Where each section of a 64-bit ELF file begins, and its size."""
    if elf[:5] != b"\x7fELF\x02":
        return {}
    (table,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    texts = headers[names][4]
    return {
        elf[texts + name : elf.index(b"\0", texts + name)].decode(): (begin, length)
        for name, _, _, _, begin, length in headers
    }


def _entries(cubin: bytes, begin: int, end: int) -> Iterator[int]:
    """Where a kernel's entries are."""
    while begin < end:
        form, number, size = _ATTRIBUTE.unpack_from(cubin, begin)
        begin += _ATTRIBUTE.size
        if form == _HAS_MORE:
            if number == _LISTED:
                yield from range(begin, begin + size, _ENTRY.size)
            begin += size


def _does(text: bytes, place: int) -> int:
    return struct.unpack_from("<H", text, place)[0] & 0xFFF


def _exchanges(text: bytes, place: int, number: int) -> bool:
    """Whether it is the instruction that writes a new mbarrier at a uniform register's value and this number."""
    return _does(text, place) == _EXCHANGE and int.from_bytes(text[place + 5 : place + 8], "little") == number
