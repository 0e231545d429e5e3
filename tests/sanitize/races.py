"""Which of racecheck's reports are explained: races.toml, read, and held against findings and against the source."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import places
from .findings import Finding, pairs
from .sources import HOUSE, Tree

TABLE = Path(__file__).with_name("races.toml")
# file by its path below the kernels' folder, function, text of the line
Line = tuple[str, str, str]
# access before it
Key = tuple[str, str, str, str]
# what a line says that reads or writes shared memory; one that says nothing of the kind has an instruction that the
# compiler moved there
_ACCESS = re.compile(
    r"\.(load|store|index|slice)\(|\b(tma_|warpgroup_mma|copy_to_shared)|\[.*\] ="
    r"|\b(reduce_warp_partials|publish_decays|make_intra_operands|causal_decay)"
)


@dataclass(frozen=True, order=True, slots=True)
class Pair:
    """Two places of a kernel, in the order of their text."""

    kernel: str
    first: Key
    second: Key


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of kernels that read and write some places in shared memory, and what orders each write before or after
    each of the others. Which pairs of them a run reports differs from run to run."""

    kernels: tuple[str, ...]
    order: str
    reads: tuple[Line, ...]
    writes: tuple[Line, ...]

    def explains(self, pair: Pair) -> bool:
        ways = (pair.first, pair.second), (pair.second, pair.first)
        return pair.kernel in self.kernels and any(
            self._has(x, "Write") and (self._has(y, "Write") or self._has(y, "Read")) for x, y in ways
        )

    def _has(self, place: Key, access: str) -> bool:
        """Whether it is one of the lines, or an instruction moved away from one. What is moved is known by its function
        and by the other access, which tells the memory."""
        lines = self.writes if access == "Write" else self.reads
        if place[0] != access:
            return False
        is_moved = place[2] != "" and not _ACCESS.search(place[3])
        return place[1:] in lines or (is_moved and place[2] in {function for _, function, _ in lines})


@cache
def table(path: Path = TABLE) -> tuple[Lines, ...]:
    """What orders accesses. Raises ValueError for an entry that is not as the file says, or lines that are there
    twice."""
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    orders, found = said.get("orders", {}), []
    for entry in said.get("lines", []):
        if set(entry) != {"kernels", "order", "reads", "writes"}:
            raise ValueError(f"{path.name}: expected kernels, order, reads and writes; got {', '.join(entry)}")
        if entry["order"] not in orders:
            raise ValueError(f"{path.name}: order: expected one of {', '.join(orders)}; got {entry['order']}")
        reads, writes = (tuple(map(tuple, entry[name])) for name in ("reads", "writes"))
        for lines in (reads, writes):
            if any(len(line) != 3 for line in lines) or len(set(lines)) != len(lines):
                raise ValueError(f"{path.name}: expected lines of three texts, each once; got {lines}")
        if not writes:
            raise ValueError(f"{path.name}: expected a write beside {reads}")
        found.append(Lines(tuple(entry["kernels"]), orders[entry["order"]], reads, writes))
    return tuple(found)


def pairs_of(finding: Finding) -> list[Pair]:
    """Of one report; without any place, a pair of nowhere, which no table explains."""
    if not finding.places:
        return [Pair(finding.kernel, ("", "", "", finding.text), ("", "", "", finding.text))]
    return [Pair(finding.kernel, x.key(), y.key()) for x, y in pairs(finding)]


def unexplained(found: Iterable[Finding], known: tuple[Lines, ...] | None = None) -> list[Pair]:
    """Pairs that the table does not explain, each once."""
    known = table() if known is None else known
    reported = {pair for finding in found for pair in pairs_of(finding) if not is_dispatch(pair)}
    return sorted(pair for pair in reported if not any(lines.explains(pair) for lines in known))


def is_dispatch(pair: Pair, tree: Tree = HOUSE) -> bool:
    """Whether it is Triton's own: the bytes that say which partition each warp of a kernel runs, and its arguments.

    Triton stores them where the first warps share work out and where they end, before a meeting of the whole block at
    its barrier 1; the other warps read theirs between that one and the next. The reads have the kernel's first line,
    the stores that or what stands beside them: tests/partition_dispatch.py looks for that in each kernel compiled. An
    access of ours may have lost its line to the first one as well; then the other one still has its own.
    """
    ways = (pair.first, pair.second), (pair.second, pair.first)
    heads = {
        ("Read", each.file, pair.kernel, f"def {pair.kernel}(")
        for each in tree.entries(pair.kernel)
        if each.first_warps
    }
    return any(x in heads and y[0] == "Write" and ".store(" not in y[3] for x, y in ways)


def stale(known: tuple[Lines, ...] | None = None) -> list[Line]:
    """Lines of the table that the source no longer has."""
    known = table() if known is None else known
    return sorted({line for lines in known for line in lines.reads + lines.writes if not places.stands(*line)})


def entry(pair: Pair, order: str) -> str:
    """A pair as the table has it, where no entry has any of it."""

    def text(x: str) -> str:
        return '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def lines(access: str) -> str:
        found = sorted({place[1:] for place in (pair.first, pair.second) if place[0] == access})
        return "[\n" + "".join(f"    [{', '.join(map(text, line))}],\n" for line in found) + "]"

    head = f"[[lines]]\nkernels = [{text(pair.kernel)}]\norder = {text(order)}"
    return f"{head}\nreads = {lines('Read')}\nwrites = {lines('Write')}\n"
