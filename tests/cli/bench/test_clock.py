"""What is reported of repeated runs, on a clock that the tests turn."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from holdfast.cli.bench import clock

CPU = torch.device("cpu")


def lasting(monkeypatch, *seconds):
    """Runs of these lengths in turn, the first two of which find out how many there are."""
    left = list(seconds)
    monkeypatch.setattr(clock, "seconds_of", lambda run, device: left.pop(0))
    return left


def test_quartiles_are_those_of_the_runs_themselves(monkeypatch):
    """Inclusive: of five sorted runs the second and the fourth; nothing is extrapolated beyond what was seen."""
    monkeypatch.setattr(clock, "SECONDS", 1.0)
    monkeypatch.setattr(clock, "LEAST", 5)
    left = lasting(monkeypatch, 0.3, 0.2, 0.005, 0.001, 0.003, 0.002, 0.004)
    times = clock.time_runs(lambda: None, CPU)
    assert left == []
    found = (times.low_ms, times.median_ms, times.high_ms)
    assert found == (pytest.approx(2.0), pytest.approx(3.0), pytest.approx(4.0))
    assert (times.runs, times.method) == (5, "wall clock")


@pytest.mark.parametrize(
    ("warm", "runs"), [((9.0, 0.1), 10), ((0.1, 9.0), 10), ((5.0, 5.0), 5), ((1e-5, 1e-5), 100), ((0.0, 0.0), 100)]
)
def test_as_many_runs_as_fit_into_the_time(monkeypatch, warm, runs):
    """By the faster of the two that warm up, at least LEAST and at most MOST."""
    monkeypatch.setattr(clock, "SECONDS", 1.0)
    monkeypatch.setattr(clock, "LEAST", 5)
    lasting(monkeypatch, *warm, *[0.001] * runs)
    assert clock.time_runs(lambda: None, CPU).runs == runs


@pytest.fixture
def turned(monkeypatch):
    """A clock that stands still but for what a run adds to it."""
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_a_run_lasts_from_its_start_to_its_end(turned):
    assert clock.seconds_of(lambda: turned(0.25), CPU) == pytest.approx(0.25)


def test_calls_are_timed_one_by_one(turned, monkeypatch):
    monkeypatch.setattr(clock, "SECONDS", 1.0)
    calls = []

    def run():
        calls.append(1)
        turned(0.01)

    times = clock.time_calls(run, CPU, calls=4)
    # 3 to find out that a block takes 40 ms, then 25 blocks (a float less than 25 is 24)
    assert times.runs in (24, 25)
    assert len(calls) == 3 + 4 * times.runs
    assert times.median_ms == pytest.approx(10.0)
    assert "blocks of 4 calls" in times.method


def test_calls_too_short_for_the_clock_are_timed_most_often(turned, monkeypatch):
    monkeypatch.setattr(clock, "SECONDS", 1.0)
    times = clock.time_calls(lambda: None, CPU)
    assert (times.runs, times.median_ms) == (100, 0.0)


def test_the_host_alone_is_timed_where_there_is_a_device(turned, monkeypatch):
    assert clock.host_ms(lambda: turned(0.01), CPU) is None
    monkeypatch.setattr(clock, "synchronize", lambda device: turned(5.0))
    lengths = iter([0.001, 0.004, 0.002])
    assert clock.host_ms(lambda: turned(next(lengths)), torch.device("cuda"), runs=3) == pytest.approx(2.0)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ValueError, match=r"--graph: CUDA graphs need an NVIDIA GPU; the device is cpu"):
        clock.time_runs(lambda: None, CPU, "graph")


class Gpu:
    """Stands for torch in the clock: runs take as long as they say, a flush takes longer, all is noted in order."""

    int8 = torch.int8

    def __init__(self, cache: int) -> None:
        self.now, self.events, self.cuda, self.cache = 0.0, [], self, cache

    def does(self, what, ms=0.0):
        self.events.append(what)
        self.now += ms

    def run(self):
        self.does("run", 2.0)

    def empty(self, size, dtype, device):
        assert dtype == torch.int8
        return SimpleNamespace(zero_=lambda: self.does(f"flush {size}", 50.0))

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=self.cache)

    def Event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None, elapsed_time=lambda other: other.at - event.at)
        event.record = lambda: setattr(event, "at", self.now)
        return event

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.does("wait"))

    def current_stream(self):
        return self.Stream()

    def device(self, device):
        return nullcontext()

    def stream(self, stream):
        return nullcontext()

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.does("replay", 1.0))

    def graph(self, graph):
        self.does("capture")
        return nullcontext()

    def synchronize(self, device):
        self.does("synchronize")


CUDA = torch.device("cuda")


@pytest.mark.parametrize(("cache", "flushed"), [(2**20, 2**28), (2**28, 2**29)])
def test_on_a_gpu_the_time_lies_between_events_after_the_cache_was_overwritten(monkeypatch, cache, flushed):
    """By 256 MiB, or twice a larger cache."""
    gpu = Gpu(cache)
    monkeypatch.setattr(clock, "torch", gpu)
    monkeypatch.setattr(clock, "_count", lambda run, device: 3)
    times = clock.time_runs(gpu.run, CUDA)
    assert gpu.events == [f"flush {flushed}", "run"] * 3 + ["synchronize"]
    assert (times.low_ms, times.median_ms, times.high_ms, times.runs) == (2.0, 2.0, 2.0, 3)
    assert times.method == "device events, L2 flushed"


def test_a_graph_is_captured_after_a_run_on_a_stream_aside_and_its_replays_are_timed(monkeypatch):
    gpu = Gpu(1)
    monkeypatch.setattr(clock, "torch", gpu)
    monkeypatch.setattr(clock, "_count", lambda run, device: 2)
    times = clock.time_runs(gpu.run, CUDA, "graph")
    assert gpu.events == ["wait", "run", "wait", "capture", "run"] + [f"flush {2**28}", "replay"] * 2 + ["synchronize"]
    assert (times.median_ms, times.method) == (1.0, "CUDA-graph replay, L2 flushed")


@pytest.mark.parametrize(
    ("host", "method", "captures", "found"),
    [
        (None, "events", True, ("events", "")),
        (0.5, "events", True, ("events", "")),
        (0.51, "events", True, ("graph", "")),
        (0.51, "graph", True, ("graph", "")),
        (0.51, "events", False, ("events", "cannot be captured: RuntimeError: it syncs")),
    ],
)
def test_where_the_host_takes_over_half_of_the_time_replays_are_timed(monkeypatch, host, method, captures, found):
    def time_runs(run, device, how):
        if how == "graph" and not captures:
            raise RuntimeError("it\nsyncs")
        return clock.Times(1.0, 1.0, 1.0, 1, how)

    monkeypatch.setattr(clock, "time_runs", time_runs)
    monkeypatch.setattr(clock, "host_ms", lambda run, device: host)
    times, host_ms, note = clock.device_times(lambda: None, CUDA, method)
    assert (times.method, note, host_ms) == (*found, host)
    assert method == "graph" or clock.device_times(lambda: None, CUDA)[0].method == found[0]
