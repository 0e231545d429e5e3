"""Which of racecheck's reports are explained: races.toml, read, and held against findings and against the source."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import sources
from .findings import Finding, pairs

TABLE = Path(__file__).with_name("races.toml")
# access, file, function, text of the line
Key = tuple[str, str, str, str]


@dataclass(frozen=True, order=True, slots=True)
class Pair:
    """Two places of a kernel, in the order of their text."""

    kernel: str
    first: Key
    second: Key


@cache
def table(path: Path = TABLE) -> dict[Pair, str]:
    """What orders each pair. Raises ValueError for an entry that is not as the file says, or that is there twice."""
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    orders, found = said.get("orders", {}), {}
    for entry in said.get("pair", []):
        if set(entry) != {"kernel", "first", "second", "order"}:
            raise ValueError(f"{path.name}: expected kernel, first, second and order; got {', '.join(entry)}")
        pair = Pair(entry["kernel"], tuple(entry["first"]), tuple(entry["second"]))
        if len(pair.first) != 4 or len(pair.second) != 4 or pair.first > pair.second:
            raise ValueError(f"{path.name}: expected two places of four texts, the lesser first; got {pair}")
        if entry["order"] not in orders:
            raise ValueError(f"{path.name}: order: expected one of {', '.join(orders)}; got {entry['order']}")
        if pair in found:
            raise ValueError(f"{path.name}: expected each pair once; got {pair} twice")
        found[pair] = orders[entry["order"]]
    return found


def pairs_of(finding: Finding) -> list[Pair]:
    """Of one report; without any place, a pair of nowhere, which no table explains."""
    if not finding.places:
        return [Pair(finding.kernel, ("", "", "", finding.text), ("", "", "", finding.text))]
    return [Pair(finding.kernel, x.key(), y.key()) for x, y in pairs(finding)]


def unexplained(found: Iterable[Finding], known: dict[Pair, str] | None = None) -> list[Pair]:
    """Pairs that the table does not have, each once."""
    known = table() if known is None else known
    return sorted({pair for finding in found for pair in pairs_of(finding) if pair not in known})


def stale(known: dict[Pair, str] | None = None) -> list[Key]:
    """Places of the table that the source no longer has."""
    known = table() if known is None else known
    places = {place for pair in known for place in (pair.first, pair.second)}
    return sorted(place for place in places if not sources.stands(*place[1:]))


def entry(pair: Pair, order: str) -> str:
    """A pair as the table has it."""

    def text(x: str) -> str:
        return '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"'

    places = (f"[{', '.join(map(text, place))}]" for place in (pair.first, pair.second))
    first, second = places
    return f"[[pair]]\nkernel = {text(pair.kernel)}\nfirst = {first}\nsecond = {second}\norder = {text(order)}\n"
