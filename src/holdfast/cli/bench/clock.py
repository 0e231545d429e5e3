"""Times a function: device events or graph replays on a GPU, the wall clock elsewhere."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from .failure import one_line

Method = Literal["events", "graph"]
# Time for the runs of one row, and how many they are at least and at most; --seconds changes the first.
SECONDS, LEAST, MOST = 1.0, 5, 100


@dataclass(frozen=True)
class Times:
    """Milliseconds of repeated runs: median, first and third quartile, and how they were taken."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int
    method: str


def synchronize(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """One run, until the device is done."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _summary(times: list[float], method: str) -> Times:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Times(median, low, high, len(times), method)


def _count(run: Callable[[], object], device: torch.device) -> int:
    """How many runs fit into SECONDS, within LEAST and MOST; the runs that find it out warm up."""
    once = min(seconds_of(run, device) for _ in range(2))
    return max(LEAST, min(MOST, int(SECONDS / max(once, 1e-9))))


def time_runs(run: Callable[[], object], device: torch.device, method: Method = "events") -> Times:
    """Median and quartiles of several runs.

    On a GPU the time lies between two events on the stream, and the L2 cache is overwritten before each run; with
    method "graph" the run is captured once and replayed, which takes the host out of it. Elsewhere the wall clock.

    Raises ValueError for "graph" off CUDA.
    """
    if device.type != "cuda":
        if method == "graph":
            raise ValueError(f"--graph: CUDA graphs need an NVIDIA GPU; the device is {device}")
        times = [seconds_of(run, device) * 1e3 for _ in range(_count(run, device))]
        return _summary(times, "wall clock")
    with torch.cuda.device(device):
        if method == "graph":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        count = _count(run, device)
        # more than the cache; while the device writes it, the host gets ahead, if its part of a run is short
        flush = torch.empty(
            max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 2**28), dtype=torch.int8, device=device
        )
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in marks:
            flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        said = "CUDA-graph replay, L2 flushed" if method == "graph" else "device events, L2 flushed"
        return _summary([start.elapsed_time(end) for start, end in marks], said)


def time_calls(run: Callable[[], object], device: torch.device, calls: int = 20) -> Times:
    """What a call costs the host when nothing waits for the device: blocks of calls, so few that no queue fills up."""
    count = max(LEAST, min(MOST, int(SECONDS / max(calls * min(seconds_of(run, device) for _ in range(3)), 1e-9))))
    times = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e3)
    synchronize(device)
    return _summary(times, f"host clock, blocks of {calls} calls, device not waited for")


def bound_by_host(median_ms: float | None, host_ms: float | None) -> bool:
    """Whether a call takes the host so long that the time between events may not be the device's."""
    return bool(median_ms and host_ms and host_ms > 0.5 * median_ms)


def host_ms(run: Callable[[], object], device: torch.device, runs: int = 10) -> float | None:
    """Milliseconds that the host spends on a call without waiting for the device; None where they are the same."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(runs):
        synchronize(device)
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    return statistics.median(times)


def device_times(
    run: Callable[[], object], device: torch.device, method: Method = "events"
) -> tuple[Times, float | None, str]:
    """The times of a run, what it costs the host, and what is to be said of them.

    Where the device waits for the host, its own time is that of replays. The note says of a run that it
    cannot be captured.
    """
    times, host = time_runs(run, device, method), host_ms(run, device)
    if method == "events" and bound_by_host(times.median_ms, host):
        try:
            return time_runs(run, device, "graph"), host, ""
        except RuntimeError as error:
            return times, host, f"cannot be captured: {one_line(error)[:80]}"
    return times, host, ""
