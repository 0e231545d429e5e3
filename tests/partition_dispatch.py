"""How Triton tells warps which partition of a kernel to run, and with what: in shared memory, between two meetings."""

import re
from collections.abc import Iterator
from itertools import pairwise

_READ = re.compile(r"ld\.shared\.b8\s+.*\+(\d+)\];")
_STORE = re.compile(r"st\.shared\.")
_PLACE = re.compile(r"\[global_smem\+(\d+)\], ")
_MEETING = re.compile(r"barrier\.sync\s+1;")
_ENDS = ("@", "bra", "brx", "ret")
# warps beside the first ones, at most
_BYTES = 16


def faults(ptx: str) -> Iterator[str]:
    """What of a kernel's PTX is not as sanitize.races.is_dispatch takes it to be.

    Of shared memory one byte alone is read, at the kernel's first line and after a meeting of the block. What is stored
    to such bytes, and whatever else is stored at that line, comes before a meeting, and nothing else between.
    """
    lines = [line.strip() for line in ptx.splitlines() if line.startswith("\t")]
    lines = [line for line in lines if not line.startswith("//")]
    first = next((line.split()[1:3] for line in lines if line.startswith(".loc")), [])
    at, bytes_at = first, None
    for n, line in enumerate(lines):
        if line.startswith(".loc"):
            at = line.split()[1:3]
        elif read := _READ.match(line):
            bytes_at = int(read[1])
            if at != first or not any(map(_MEETING.match, lines[max(0, n - 4) : n])):
                yield line
        elif _STORE.match(line) and at == first and not _comes_before_a_meeting(lines[n + 1 :]):
            yield line
    for line, following in pairwise(lines):
        place = _PLACE.search(line) if _STORE.match(line) else None
        is_there = place and bytes_at is not None and 0 <= int(place[1]) - bytes_at < _BYTES
        if is_there and not (_MEETING.match(following) or _STORE.match(following)):
            yield f"{line} {following}"


def _comes_before_a_meeting(lines: list[str]) -> bool:
    following = next((line for line in lines if _MEETING.match(line) or line.startswith(_ENDS)), "")
    return bool(_MEETING.match(following))
