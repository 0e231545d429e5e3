"""Which of initcheck's reports are of memory that is written: unseen.toml, read."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .findings import Finding

TABLE = Path(__file__).with_name("unseen.toml")


@dataclass(frozen=True, slots=True)
class Read:
    """A line of a kernel that reads what is written where the tool does not look, and the test that shows it."""

    kernel: str
    file: str
    text: str
    written_by: str
    test: str


@cache
def table() -> tuple[Read, ...]:
    return tuple(Read(**entry) for entry in tomllib.loads(TABLE.read_text())["reads"])


def is_known(finding: Finding) -> bool:
    lines = {(each.file, each.text) for each in table() if each.kernel == finding.kernel}
    return bool(finding.places) and all((place.file, place.text) in lines for place in finding.places)
