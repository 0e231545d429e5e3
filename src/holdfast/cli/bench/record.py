"""Results on disk: one JSON file a run, with what is needed to read it years later."""

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from holdfast.planner import Device
from holdfast.planner.whole_file import write_text

from .result import Result
from .roofs import Roofs

FORMAT = "holdfast-bench-1"
_PACKAGES = (
    "holdfast", "torch", "triton", "fla-core", "flash-linear-attention", "mlstm_kernels", "mamba-ssm", "flashrnn",
    "accelerated-scan",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One run of a suite, or of cases given by hand.

    command: as typed. commit: of the working tree, with "+changes" where it was not clean; as --commit says outside of
    git. date: UTC, ISO 8601. device: kind and name. complete: whether the run reached its end. first_calls: how first
    calls were measured, "" if they were not.
    """

    suite: str
    title: str
    command: str
    date: str
    commit: str
    device: dict[str, Any]
    versions: dict[str, str]
    roofs: Roofs
    rows: tuple[Result, ...]
    complete: bool = True
    first_calls: str = ""

    def continues(self, other: "Record") -> bool:
        """Whether rows of an earlier, unfinished run of the same thing with the same code may stand in this one."""
        same = ("suite", "command", "commit", "device", "versions")
        return all(getattr(self, name) == getattr(other, name) for name in same)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Kind and name of a device, and what else decides its speed."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return {"kind": "cuda", "name": gpu.name, "sms": gpu.multi_processor_count, "memory_bytes": gpu.total_memory}
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        lines = (line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if "model name" in line)
        model = next(lines, model)
    return {"kind": device.type, "name": model, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def device_folder(facts: dict[str, Any]) -> str:
    """A folder name for a device: "cpu", a GPU's name in the planner such as "h200", or its own in lower case."""
    if facts["kind"] != "cuda":
        return facts["kind"]
    known = Device.recognised(facts["name"])
    return known.name if known else re.sub(r"[^a-z0-9]+", "-", facts["name"].lower()).strip("-")


def versions() -> dict[str, str]:
    """Python, CUDA and the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    from holdfast import __version__

    return found | {"holdfast": __version__, "torch": torch.__version__, "cuda": torch.version.cuda or ""}


def commit() -> str:
    """The commit of the working tree that this package lies in."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return ""
    if head.returncode:
        return ""
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(record: Record, path: Path) -> None:
    """Writes the file whole or not at all."""
    write_text(path, json.dumps({"format": FORMAT} | asdict(record), indent=1) + "\n")


def is_record(path: Path) -> bool:
    """Whether the file is one of ours; other benchmarks keep theirs beside them."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (ValueError, AttributeError):
        return False


def read(path: Path) -> Record:
    """What write wrote; ValueError for any other file."""
    if not is_record(path):
        raise ValueError(f"{path}: expected a file of holdfast bench, of format {FORMAT}")
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["format"]
    try:
        rows = tuple(Result(**row) for row in data.pop("rows"))
        return Record(**data | {"roofs": Roofs(**data["roofs"]), "rows": rows})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole result of holdfast bench: {error}") from error
