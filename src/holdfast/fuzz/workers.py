"""Runs scenarios in processes of their own, so that one that crashes or hangs costs a row and no more."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .row import Row

# seconds that a scenario may take; compiled ones wait for a compiler of many seconds
LIMIT = 60.0
_COMPILED = 3
# of the time allowed, after which a worker writes where each of its threads is
_WATCHED = 0.95
# a worker that has not come up by then never will
_START = 180.0

Run = Callable[[str], Row]
Begin = Callable[[], dict[str, Any]]


def allowed(line: str, limit: float) -> float:
    """Seconds that the scenario of a line may take."""
    return limit * (_COMPILED if "mode=compile" in line.split() else 1)


def _work(connection: Connection, log: str, begin: Begin, run: Run, limit: float) -> None:
    """What a worker does: rows for lines, until it is told to end or its process is spoilt."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    connection.send(begin())
    while (line := connection.recv()) is not None:
        os.ftruncate(file, 0)
        faulthandler.dump_traceback_later(_WATCHED * allowed(line, limit))
        row = run(line)
        faulthandler.cancel_dump_traceback_later()
        connection.send(row)
        if row.spoilt:
            # the driver may hang where an ordinary end would clean up
            os._exit(0)


def _of_the_busy(stacks: str) -> str:
    """Without the threads that wait for work, of a pool or a progress bar, many of which may come before the one."""
    said, *threads = re.split(r"(?=Thread 0x|Current thread 0x)", stacks)
    idle = r'[^"]*"(futures/thread\.py", line \d+ in _worker|python[^"/]*/threading\.py", line \d+ in wait) '
    return said + "".join([x for x in threads if not re.match(idle, x)] or threads)


class _Worker:
    def __init__(self, folder: Path, number: int, begin: Begin, run: Run, limit: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = folder / f"{number}.log"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, str(self.log), begin, run, limit), daemon=True)
        self.process.start()
        theirs.close()
        self.line: str | None = None
        self.is_up = False
        self.since = time.monotonic()

    def give(self, line: str) -> None:
        self.line, self.since = line, time.monotonic()
        # one that has died meanwhile is heard of next
        with contextlib.suppress(OSError):
            self.connection.send(line)

    def overdue(self, limit: float) -> bool:
        allowance = _START if not self.is_up else allowed(self.line, limit) if self.line else float("inf")
        return time.monotonic() - self.since > allowance

    def dismiss(self) -> None:
        """Lets it end by itself."""
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def end(self, patience: float = 0.0) -> None:
        if patience:
            self.process.join(patience)
        self.process.kill()
        self.process.join(10)
        self.connection.close()

    def _said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        text = self._said()
        said = " ".join(text.partition("Extension modules:")[0].split())
        # where this machine keeps its files is nobody's business, and takes the room of another frame
        said = re.sub(r'File "[^"]*/([^/"]+/[^/"]+)"', r'File "\1"', said)
        for stack in ("Fatal Python error", "Timeout ("):
            # the innermost frames come first
            if (place := said.find(stack)) >= 0:
                return said[max(place - 300, 0) : place] + _of_the_busy(said[place:])[:400]
        return said[-600:]

    def lost(self, limit: float, hung: bool) -> Row:
        seconds = time.monotonic() - self.since
        allowance = allowed(self.line or "", limit)
        if hung:
            reason = f"no answer in {allowance:.0f} s"
        else:
            self.process.join(10)
            reason = f"the worker ended with status {self.process.exitcode}"
            # Python writes the stacks of threads that run on meanwhile, and may fault over it (cpython#131580)
            if hung := bool(re.search(r"^Timeout \(\d", self._said(), re.MULTILINE)):
                reason = f"no answer in {_WATCHED * allowance:.0f} s; writing where it was, {reason}"
        said = self.last_words()
        detail = f"{reason}: {said}" if said else reason
        return Row(self.line or "", "hung" if hung else "crashed", detail, seconds=round(seconds, 3))


class Pool:
    """Workers that share a device. environment: what the first of them said of its versions and device."""

    def __init__(self, workers: int, begin: Begin, run: Run, limit: float = LIMIT) -> None:
        """begin, run: called in the workers, importable by their names: begin once, run for each line."""
        self.count, self.begin, self.run, self.limit = workers, begin, run, limit
        self.environment: dict[str, Any] = {}
        self.lost_starts = 0

    def rows(self, lines: Iterable[str], until: float = float("inf")) -> Iterator[Row]:
        """A row for each line, as they come; none is begun after `until` on the monotonic clock.

        Raises RuntimeError where workers do not come up at all.
        """
        waiting = iter(lines)
        with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
            made = 0
            workers: list[_Worker] = []
            idle: list[_Worker] = []
            try:
                while True:
                    while waiting is not None and len(workers) < self.count and time.monotonic() < until:
                        workers.append(_Worker(Path(folder), made, self.begin, self.run, self.limit))
                        made += 1
                    if not workers:
                        return
                    yield from self._hear(workers)
                    for worker in [w for w in workers if w.is_up and w.line is None]:
                        line = next(waiting, None) if waiting is not None and time.monotonic() < until else None
                        if line is not None:
                            worker.give(line)
                            continue
                        waiting = None
                        workers.remove(worker)
                        idle.append(worker)
                        worker.dismiss()
                    if waiting is None or time.monotonic() >= until:
                        for worker in [w for w in workers if not w.is_up]:
                            workers.remove(worker)
                            worker.end()
            finally:
                for worker in workers:
                    worker.end()
                for worker in idle:
                    worker.end(patience=5)

    def _hear(self, workers: list[_Worker]) -> Iterator[Row]:
        """Rows of the workers that answered, died or are overdue; the last two kinds are let go."""
        ready = set(wait([worker.connection for worker in workers], timeout=0.5))
        for worker in list(workers):
            if worker.connection in ready:
                try:
                    said = worker.connection.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    if worker.line is not None:
                        yield worker.lost(self.limit, hung=False)
                    elif not worker.is_up:
                        self._count_start(worker)
                    worker.end()
                    continue
                if not worker.is_up:
                    worker.is_up, self.environment = True, self.environment or said
                else:
                    worker.line = None
                    if said.spoilt:
                        workers.remove(worker)
                        worker.end()
                    yield said
            elif worker.overdue(self.limit):
                workers.remove(worker)
                if worker.line is not None:
                    yield worker.lost(self.limit, hung=True)
                else:
                    self._count_start(worker)
                worker.end()

    def _count_start(self, worker: _Worker) -> None:
        self.lost_starts += 1
        if self.lost_starts > self.count:
            raise RuntimeError(f"fuzz: workers do not come up; the last one said: {worker.last_words()}")


def default_workers(device: str) -> int:
    """As many as share a GPU well, and no more than there are processors."""
    processors = os.cpu_count() or 1
    return max(1, min(12, processors - 2)) if device == "cuda" else processors
