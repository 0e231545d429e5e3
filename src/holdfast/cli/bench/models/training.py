"""Tokens a second of training the whole model, eager and with its blocks compiled."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from holdfast.kernels.runtime.torch_private import graph_counters

from .. import clock
from ..clock import synchronize
from .device_time import by_kernel, by_kind, longest
from .mixers import Mixer
from .model import Model, make_model, training_step
from .row import Part, Row
from .scale import Scale

# Steps before those that are timed: on a GPU the first few of compiled blocks wait for the host, whose calls are
# recorded and whose allocator fills. And how many are timed.
WARM_UP = {"cpu": 2, "cuda": 8}
LEAST, MOST = 5, 12
# How far the loss of the compiled model may be from the eager one's, as a share of it.
LOSS_LIMIT = 1e-2


def training_rows(mixer: Mixer, scale: Scale, part: Part) -> list[Row]:
    """The rows to come, eager and compiled: at scale.length, or at the longer ones."""
    lengths = (scale.length,) if part == "training" else scale.longer if mixer.long else ()
    return [
        Row(part, mixer.name, mode, {"B": scale.batch_of(T), "T": T, "d": scale.width, "blocks": scale.blocks})
        for T in lengths
        for mode in ("eager", "compiled")
    ]


def _step_ms(step: Callable[[], Tensor], device: torch.device) -> list[float]:
    """Milliseconds of each of several steps, one after the other, in a queue that the host may fill ahead."""
    once = min(clock.seconds_of(step, device) for _ in range(WARM_UP[device.type]))
    count = max(LEAST, min(MOST, int(clock.SECONDS / once)))
    if device.type != "cuda":
        return [clock.seconds_of(step, device) * 1e3 for _ in range(count)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _compile(model: Model, scale: Scale) -> None:
    torch.compiler.reset()
    graph_counters().clear()
    for block in model.blocks:
        block.compile(backend=scale.compiler, dynamic=False)


def _graphs() -> dict[str, float]:
    """How many graphs the blocks came to: 1 where they share one that is whole."""
    counters = graph_counters()
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def _measured(row: Row, model: Model, tokens: Tensor, device: torch.device) -> Row:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = training_step(model, tokens)
    start = time.perf_counter()
    loss = step().item()
    first_s = time.perf_counter() - start
    finite = torch.stack([p.grad.isfinite().all() for p in model.parameters() if p.grad is not None]).all().item()
    if not finite or loss != loss:
        return replace(row, status="wrong", detail=f"loss {loss:.4g}, gradients {'' if finite else 'not '}finite")
    times = _step_ms(step, device)
    kernels = by_kernel(step, device)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    figures = {
        "tokens_per_s": tokens[:, 1:].numel() / (statistics.mean(times) / 1e3),
        "step_ms": median,
        "low_ms": low,
        "high_ms": high,
        "steps": len(times),
        "device_ms": sum(kernels.values()),
        "first_step_s": first_s,
        "loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if device.type == "cuda":
        figures["memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return replace(row, figures=figures, kinds=by_kind(kernels), kernels=longest(kernels))


def measure_training(mixer: Mixer, rows: list[Row], scale: Scale, device: torch.device) -> Iterator[Row]:
    """The given rows of one length, eager first: both start from the same weights, so that their losses compare."""
    sizes, eager_loss = rows[0].sizes, None
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(scale.vocabulary, (sizes["B"], sizes["T"] + 1), generator=draw).to(device)
    for row in rows:
        model = make_model(mixer, scale, device)
        if row.mode == "compiled":
            _compile(model, scale)
        found = _measured(replace(row, note=mixer.note), model, tokens, device)
        del model
        loss = found.figures.get("loss")
        if row.mode == "compiled" and found.status == "ok":
            found = replace(found, figures=found.figures | _graphs())
            if eager_loss and not abs(loss - eager_loss) <= LOSS_LIMIT * eager_loss:
                found = replace(found, status="wrong", figures={}, detail=f"loss {loss:.5g}, eager {eager_loss:.5g}")
        eager_loss = loss
        yield found
