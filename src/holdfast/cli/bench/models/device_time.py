"""Device time of a run by kernel and by kind, as the profiler sees it."""

from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..clock import synchronize
from .kinds import KINDS, kind_of

# Kernels that a row names, those that take longest.
NAMED = 15


def by_kernel(run: Callable[[], object], device: torch.device, runs: int = 1) -> dict[str, float]:
    """Name -> milliseconds a run, the longest first; {} where no profiler knows the device's kernels."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(runs):
            run()
        synchronize(device)
    times: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3 / runs
    return dict(times.most_common())


def by_kind(kernels: dict[str, float]) -> dict[str, float]:
    """Kind -> milliseconds, in the order of KINDS."""
    times: Counter[str] = Counter()
    for name, ms in kernels.items():
        times[kind_of(name)] += ms
    return {kind: times[kind] for kind in KINDS if times[kind]}


def longest(kernels: dict[str, float]) -> dict[str, float]:
    """The few that take longest, "kind: name" -> milliseconds."""
    return {f"{kind_of(name)}: {name}"[:120]: ms for name, ms in list(kernels.items())[:NAMED]}
