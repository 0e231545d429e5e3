"""What compute-sanitizer's output says: findings, each of a kind and of the places in the source that it names."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import sources
from .places import is_there, located, place
from .worker import MARK

_RULE = "========="
# what is said of the run, or of what the host asked for, not of device code
_ABOUT_THE_RUN = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application",
    "Tracking kernels",
    "Error: process didn't terminate",
    "Error: Target application",
    "Program hit",
    "Warning: Detected overflow",
    "No kernels were checked",
)
_PLACE = re.compile(
    r"(?:(?P<access>Read|Write|Atomic|[A-Z]\w+) access )?\bat "
    r"(?:(?P<kernel>[^+]*?)\+(?P<pc>0x[0-9a-f]+)|(?P<bare>0x[0-9a-f]+))"
    r"(?: in (?P<file>[^\s:]+):(?P<line>\d+)(?::(?P<of>\S+))?)?"
)
# what a kernel of PyTorch's own, or of a library that it calls, has in its name
_OTHERS = re.compile(r"\bat::|\bat_cuda_detail::|\bc10::|\bcub::|\bthrust::|\bcutlass|^cublas|^nvjet_|^sm\d+_xmma_")
_MISALIGNED = re.compile(r"Access to 0x([0-9a-f]+) is misaligned")
_HAZARDS = re.compile(r"\[(\d+) hazards?\]")


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where device code stands. access: what it does there, where that is said. file: by its path below the kernels'
    folder; all that it may be, where that cannot be told (places.located). function: that it is written in. text: of
    its line."""

    access: str
    file: str
    function: str
    text: str
    line: int = 0

    def key(self) -> tuple[str, str, str, str]:
        """What stays the same when other lines move."""
        return self.access, self.file, self.function, self.text


@dataclass(frozen=True, slots=True)
class Finding:
    """One record of the tool's. kernel: its name in machine code. call: what ran. count: hazards, or 1."""

    kind: str
    kernel: str
    places: tuple[Place, ...]
    call: str
    count: int = 1
    text: str = ""

    def in_pytorch(self) -> bool:
        """Whether it is said of a kernel of PyTorch's; one whose name says nothing is taken for one of ours."""
        if _bare(self.kernel) in sources.names() or any(is_there(p.file) for p in self.places):
            return False
        return bool(_OTHERS.search(self.kernel))

    def is_aligned_for_tma(self) -> bool:
        """Whether memcheck calls a copy by TMA misaligned whose tensor begins at a multiple of 16 bytes.

        That is what a descriptor asks (CUDA's driver API, cuTensorMapEncodeTiled: globalAddress). The tool has been
        seen to want 128.
        """
        found = _MISALIGNED.search(self.text)
        if found is None or int(found[1], 16) % 16 or not self.places:
            return False
        return all("tma_" in p.text for p in self.places)


def _bare(name: str) -> str:
    """A function's name in machine code without its result's type and its parameters."""
    return name.partition("(")[0].rpartition(" ")[2]


def begins_record(line: str) -> bool:
    said = line.removeprefix(_RULE)
    return (
        said != line and said.strip() != "" and said[:5].strip() != "" and not said.strip().startswith(_ABOUT_THE_RUN)
    )


def findings(lines: Iterable[str]) -> Iterator[Finding]:
    """Of one process's output, between whose lines the worker has marked which call runs. A record that cannot be read
    is one without kernel and places."""
    call, record = "", []
    for line in lines:
        if line.startswith(_RULE):
            said = line[len(_RULE) :].rstrip()
            if said.startswith("     ") and record:
                record.append(said.strip())
                continue
            yield from _finding(record, call)
            record = [said.strip()] if begins_record(line) else []
        elif line.startswith(MARK):
            yield from _finding(record, call)
            call, record = line[len(MARK) :].strip(), []
    yield from _finding(record, call)


def _finding(record: list[str], call: str) -> Iterator[Finding]:
    if not record:
        return
    try:
        yield _read(record, call)
    except Exception as failure:  # the others are worth reading
        text = "\n".join(record)
        yield Finding(f"{record[0]} (not read: {type(failure).__name__}: {failure})", "", (), call, 1, text)


def _read(record: list[str], call: str) -> Finding:
    found, kernel, count = [], "", 0
    for said in record:
        if said.startswith(("Saved host backtrace", "Host Frame")):
            break
        if said.startswith(("Device Frame", "by thread", "Address", "and is")):
            continue
        for match in _PLACE.finditer(said):
            of, line = match["of"] or "", int(match["line"] or 0)
            kernel = kernel or match["kernel"] or of
            ran = match["kernel"] or kernel
            # accesses are what racecheck names; synccheck's places are barriers, which stand where it says
            file = located(match["file"] or "", line, _bare(ran), _bare(of), match["access"] or "")
            found.append(Place(match["access"] or "", file, *place(file, line), line))
        count += sum(map(int, _HAZARDS.findall(said)))
    kind = re.sub(r"\s+at .*| between .*", "", record[0])
    return Finding(kind, kernel, tuple(found), call, count or 1, "\n".join(record))


def pairs(finding: Finding) -> Iterator[tuple[Place, Place]]:
    """The pairs of places that a race is reported between: the first one with each of the others, in a fixed order."""
    first, *others = finding.places
    for other in others or [first]:
        yield min(first, other, key=Place.key), max(first, other, key=Place.key)
