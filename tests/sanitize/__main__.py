"""All GPU kernels under the tools of compute-sanitizer: `PYTHONPATH=src:tests python -m sanitize --out FOLDER`.

First every call runs without a sanitizer, so that nothing is compiled under one; then each tool's processes share the
calls. A call that failed beside the others, or of which a record has no place, runs again alone. The folder gets each
tool's output, compressed, and summary.json: what was found, which calls failed and which kernels were never launched.
Exits with 1 if there is any of these, but for races that races.toml explains and for what is listed as "in kernels of
PyTorch", "aligned for TMA" or, by unseen.toml, "written, unseen"; CONTRIBUTING.md says more of these.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from . import races, sources, unseen
from .calls import CALLS
from .findings import Finding, begins_record, findings
from .worker import MARK

# it counts a kernel's mbarriers by what the compiler says, which is fewer than there are: of more it follows none
BARRIERS = "--num-cuda-barriers=128"
TOOLS = {
    "memcheck": ["--destroy-on-device-error", "kernel", "--report-api-errors", "no"],
    "initcheck": [],
    "synccheck": [BARRIERS],
    "racecheck": [BARRIERS, "--racecheck-report", "analysis"],
}
# of newer versions alone. What initcheck has not seen written is copied by the host too: tma_writes.py.
NEWER = {
    "memcheck": ["--check-tensor-ops=yes"],
    "initcheck": ["--check-tensor-ops=yes", "--check-api-memory-access=no"],
}
# a file with its folders, as several have one name
WITH_FOLDERS = "--strip-paths=no"
# racecheck ends its report of a kernel at so many pairs of accesses
MOST_HAZARDS = {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "1000000000"}
# PyTorch's own allocator would hide where an allocation ends, and what was written to its memory before
WITHOUT_CACHE = ("memcheck", "initcheck")
# What of PyTorch's kernels is no fault of ours. memcheck's is: we hand them the tensors.
NOT_OURS = ("initcheck", "synccheck", "racecheck")
# Records that a process prints. Each read of what the tool did not see written is one: where they run out, what follows
# the call is run again, by another process.
PRINTED = {"initcheck": 2000}
MOST_PRINTED = 100000
# calls of one process at most: fewer are spread more evenly, more pay less for starting
SHARE = 9


class Sanitizer:
    """The program, and how it is called. Raises SystemExit where there is none."""

    def __init__(self, named: str | None) -> None:
        beside = Path("/usr/local/cuda/bin/compute-sanitizer")
        found = named or shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)
        if found is None:
            sys.exit(
                "sanitize: compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; name it by --sanitizer"
            )
        self.program = found
        self.help = subprocess.run([found, "--help"], capture_output=True, text=True, check=True).stdout
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = said.strip().splitlines()[-1]
        # processes side by side may not share ports
        self.ports = cycle(range(49152, 65000, 32))

    def command(self, tool: str) -> list[str]:
        options = [
            "--print-limit",
            str(PRINTED.get(tool, MOST_PRINTED)),
            "--target-processes",
            "application-only",
            "--launch-timeout",
            "120",
        ]
        options += ["--show-backtrace", "device", "--port", str(next(self.ports)), *TOOLS[tool]]
        options += [each for each in (WITH_FOLDERS, *NEWER.get(tool, [])) if each.partition("=")[0] in self.help]
        return [self.program, "--tool", tool, *options]


@dataclass
class Job:
    """One process: calls by number, under a tool or, with tool "", alone."""

    tool: str
    numbers: list[int]
    folder: Path
    process: Any = None
    started: float = 0.0
    said: dict[str, Any] = field(default_factory=dict)
    # the call during which it had printed all that it may
    cut: int | None = None
    # by us, as time was up
    ended: bool = False
    # calls that another job has run again since, by name
    again: set[str] = field(default_factory=set)

    def start(self, prefix: list[str]) -> None:
        self.log, self.out = self.folder / "log", self.folder / "done.json"
        environment = os.environ | MOST_HAZARDS | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if self.tool in WITHOUT_CACHE:
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [*prefix, sys.executable, "-m", "sanitize.worker", str(self.out), self.tool, *map(str, self.numbers)]
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def end(self) -> None:
        """The tool's process, and the one that it watches."""
        self.ended = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> None:
        self.said = json.loads(self.out.read_text()) if self.out.exists() else {}
        if self.tool:
            with self.log.open(errors="replace") as log:
                self._cut(log)

    def _cut(self, log: Iterable[str]) -> None:
        """Takes calls for not done that ran after the last record that could be printed: they were not seen."""
        records, last, call = 0, -1, -1
        for line in log:
            if line.startswith(MARK):
                call += 1
            elif begins_record(line):
                records, last = records + 1, call
        if records >= PRINTED.get(self.tool, MOST_PRINTED) and last >= 0:
            seen = self.numbers[: last + 1]
            self.cut = seen[-1]
            self.said["done"] = [n for n in self.said.get("done", []) if n in seen]
            self.said["failed"] = {n: why for n, why in self.said.get("failed", {}).items() if int(n) in seen}

    def left(self) -> list[int]:
        """Calls after the one at which it stopped, which is counted as done."""
        done = len(self.said.get("done", []))
        return self.numbers[max(done, 1, 0 if self.cut is None else self.numbers.index(self.cut) + 1) :]

    def findings(self) -> list[Finding]:
        """Of the calls that no other job has run again."""
        with self.log.open(errors="replace") as log:
            return [each for each in findings(log.read().splitlines()) if each.call not in self.again]

    def unsettled(self) -> list[int]:
        """Calls that failed, and those of which a record has no place."""
        unplaced = {each.call for each in self.findings() if not each.places}
        return [n for n in self.numbers if str(n) in self.said.get("failed", {}) or CALLS[n].name in unplaced]

    def lost(self) -> list[int]:
        """The call during which the process ended of itself, if it did."""
        done = self.said.get("done", [])
        stopped = self.ended or self.said.get("stopped", False)
        return [] if stopped or self.cut in done else self.numbers[len(done) : len(done) + 1]


def run(jobs: list[Job], sanitizer: Sanitizer, at_once: int, until: float) -> list[Job]:
    """Runs them, so many at once, and what a process that stopped early left in another; past `until` none starts and
    what still runs is ended."""
    waiting, running, ended = deque(jobs), [], []
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < until:
            job = waiting.popleft()
            job.start(sanitizer.command(job.tool) if job.tool else [])
            running.append(job)
        for job in [*running]:
            if time.monotonic() >= until and job.process.poll() is None:
                job.end()
            if job.process.poll() is None:
                continue
            running.remove(job)
            job.finish()
            ended.append(job)
            if job.left() and time.monotonic() < until:
                folder = Path(tempfile.mkdtemp(dir=job.folder.parent))
                waiting.append(Job(job.tool, job.left(), folder))
        if time.monotonic() >= until and not running:
            break
        time.sleep(0.2)
    return ended


def run_again(jobs: list[Job], sanitizer: Sanitizer, scratch: Path, until: float) -> list[Job]:
    """Each unsettled call in a process of its own, one at a time: kernels whose blocks wait for one another give up
    beside too many others, and racecheck at times leaves out where accesses are."""
    ended = []
    for job in jobs:
        for number in job.unsettled():
            found = run([Job(job.tool, [number], Path(tempfile.mkdtemp(dir=scratch)))], sanitizer, 1, until)
            if any(number in each.said.get("done", []) for each in found):
                job.again.add(CALLS[number].name)
                ended += found
    return ended


def jobs(tool: str, numbers: list[int], at_once: int, scratch: Path) -> list[Job]:
    """The calls dealt out, to `at_once` processes or more, so that neighbours, which are alike and take alike long, are
    apart."""
    count = max(-(-len(numbers) // SHARE), min(at_once, len(numbers)))
    return [Job(tool, numbers[n::count], Path(tempfile.mkdtemp(dir=scratch))) for n in range(count)]


def _tidy(found: list[Finding]) -> list[dict[str, Any]]:
    """Findings of one kind, kernel and places as one, with their counts, the calls, and one's text."""
    together: dict[Any, list[Finding]] = {}
    for each in found:
        together.setdefault((each.kind, each.kernel, each.places), []).append(each)
    return [
        {
            "kind": kind,
            "kernel": kernel,
            "places": [[p.access, p.file, p.line, p.function, p.text] for p in places],
            "count": sum(each.count for each in same),
            "calls": dict(Counter(each.call for each in same)),
            "text": same[0].text,
        }
        for (kind, kernel, places), same in together.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sanitize", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tools' output and summary.json")
    parser.add_argument("--tools", default=",".join(TOOLS), help="of %(default)s, those to run")
    parser.add_argument("--calls", default="", help="only calls in whose name this regular expression is found")
    parser.add_argument("--sanitizer", help="the program; by default the one on PATH or in /usr/local/cuda")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes at once")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which what still runs is ended")
    given = parser.parse_args()
    tools = [tool for tool in given.tools.split(",") if tool]
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        parser.error(f"--tools: expected some of {', '.join(TOOLS)}; got {', '.join(unknown)}")
    start, program = time.monotonic(), Sanitizer(given.sanitizer)
    given.out.mkdir(parents=True, exist_ok=True)
    numbers = [n for n, call in enumerate(CALLS) if re.search(given.calls, call.name)]
    with tempfile.TemporaryDirectory() as scratch:
        # each process compiles with several threads of its own
        at_once = max(1, given.jobs // 2)
        first = run(jobs("", numbers, at_once, Path(scratch)), program, at_once, start + given.limit)
        warmed = time.monotonic() - start
        # the tools in turn by turns, so that a limit cuts each alike
        queue = [
            job
            for batch in zip(*(jobs(tool, numbers, given.jobs, Path(scratch)) for tool in tools), strict=True)
            for job in batch
        ]
        ended = run(queue, program, given.jobs, start + given.limit)
        ended += run_again(ended, program, Path(scratch), start + given.limit)
        summary = report(given.out, numbers, first, ended, tools)
    summary["version"] = program.version
    summary["seconds"] = {"without a tool": round(warmed), "all": round(time.monotonic() - start)}
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    told = {name: len(x) if isinstance(x, list | dict) else x for name, x in summary.items()}
    told |= {"seconds": summary["seconds"]}
    del told["tools"]
    print(
        json.dumps(told | {tool: {n: len(x) for n, x in s.items()} for tool, s in summary["tools"].items()}, indent=1)
    )
    if summary["bad"]:
        sys.exit(1)


def report(out: Path, numbers: list[int], first: list[Job], ended: list[Job], tools: list[str]) -> dict[str, Any]:
    """Writes each tool's output, before any of it is read, and returns the summary."""
    by_tool = {"alone": first, **{tool: [job for job in ended if job.tool == tool] for tool in tools}}
    for tool, of_tool in by_tool.items():
        with gzip.open(out / f"{tool}.txt.gz", "wt") as file:
            for job in of_tool:
                with job.log.open(errors="replace") as log:
                    shutil.copyfileobj(log, file)
    launched = {kernel for job in first for kernel in job.said.get("kernels", [])}
    summary: dict[str, Any] = {"calls": len(numbers), "tools": {}}
    summary["not launched"] = sorted(sources.kernels() - launched) if len(numbers) == len(CALLS) else []
    summary["launched, unknown"] = sorted(launched - sources.kernels())
    for tool, of_tool in by_tool.items():
        summary["tools"][tool] = _of_tool(tool, numbers, of_tool)
    bad = (s["failed"] or s["not run"] or s.get("unexplained", s["findings"]) for s in summary["tools"].values())
    summary["bad"] = bool(any(bad) or summary["not launched"])
    return summary


def _of_tool(tool: str, numbers: list[int], jobs: list[Job]) -> dict[str, Any]:
    """Findings, of ours and of PyTorch's apart, and the calls that failed, were not run, and were not seen whole."""
    ours, others, aligned, written = [], [], [], []
    failed, done, warned = {}, set(), set()
    for job in jobs:
        for each in job.findings():
            if each.is_aligned_for_tma():
                aligned.append(each)
            elif tool == "initcheck" and unseen.is_known(each):
                written.append(each)
            else:
                (others if tool in NOT_OURS and each.in_pytorch() else ours).append(each)
        text = job.log.read_text(errors="replace").splitlines()
        warned |= {line for line in text if line.startswith("========= Warning: Detected")}
        done |= set(job.said.get("done", []))
        stopped = {CALLS[int(n)].name: why for n, why in job.said.get("failed", {}).items()}
        stopped |= {CALLS[n].name: "the process ended" for n in job.lost()}
        failed |= {name: why for name, why in stopped.items() if name not in job.again}
    said: dict[str, Any] = {"findings": _tidy(ours), "in kernels of PyTorch": _tidy(others), "failed": failed}
    said["aligned for TMA"], said["written, unseen"] = _tidy(aligned), _tidy(written)
    said["not run"] = [CALLS[n].name for n in numbers if n not in done and CALLS[n].name not in failed]
    said["not seen whole"] = [CALLS[job.cut].name for job in jobs if job.cut is not None]
    said["warned"] = sorted(warned)
    said["run again"] = sorted(set().union(*(job.again for job in jobs)))
    said["tables put right"] = {kernel: n for job in jobs for kernel, n in job.said.get("put right", {}).items()}
    if tool == "racecheck":
        said["unexplained"] = [[p.kernel, p.first, p.second] for p in races.unexplained(ours)]
    return said


if __name__ == "__main__":
    main()
