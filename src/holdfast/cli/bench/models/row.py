"""What was measured of one mixer in one way, and the file that keeps a run's rows."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast.planner.whole_file import write_text

from ..result import Status

FORMAT = "holdfast-bench-models-1"
Part = Literal["training", "longer", "layers", "host", "decoding"]


@dataclass(frozen=True)
class Row:
    """part: of the suite. mode: which of the ways that the part knows, such as "eager" and "compiled". figures: by
    name, with the unit at the name's end: _ms, _us, _bytes; tokens_per_s. kinds: milliseconds of device time by kind
    of kernel. kernels: the longest of them. status, detail: as in the other suites' rows."""

    part: Part
    mixer: str
    mode: str
    sizes: dict[str, int]
    status: Status = "ok"
    detail: str = ""
    note: str = ""
    error: float | None = None
    limit: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from a run's other rows."""
        return self.part, self.mixer, self.mode, tuple(self.sizes.items())


@dataclass(frozen=True)
class ModelsRecord:
    """One run of the suite. As `holdfast.cli.bench.record.Record`, with scale in the place of roofs."""

    command: str
    date: str
    commit: str
    device: dict[str, Any]
    versions: dict[str, str]
    scale: dict[str, Any]
    rows: tuple[Row, ...] = ()
    complete: bool = False

    def continues(self, other: "ModelsRecord") -> bool:
        """Whether rows of an earlier, unfinished run of the same thing with the same code may stand in this one."""
        same = ("command", "commit", "device", "versions", "scale")
        return all(getattr(self, name) == getattr(other, name) for name in same)


def write(record: ModelsRecord, path: Path) -> None:
    """Writes the file whole or not at all."""
    write_text(path, json.dumps({"format": FORMAT} | asdict(record), indent=1) + "\n")


def is_models_record(path: Path) -> bool:
    """Whether the file is one that write wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (ValueError, AttributeError):
        return False


def read(path: Path) -> ModelsRecord:
    """What write wrote; ValueError for a file that is not whole."""
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["format"]
    try:
        return ModelsRecord(**data | {"rows": tuple(Row(**row) for row in data["rows"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole result of holdfast bench --suite models: {error}") from error
