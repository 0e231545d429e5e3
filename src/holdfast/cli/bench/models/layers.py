"""One layer alone, and beside it the least that it does: its projections, and its op on inputs that are ready."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from holdfast.nn.lru_gates import HeadLinear
from holdfast.nn.stack import Stack

from ..clock import device_times
from ..measure import one_pass
from ..workload import workload
from .check import both_passes
from .device_time import by_kernel, by_kind, longest
from .mixers import Mixer, op_sizes
from .row import Row
from .scale import Scale


def _products(layer: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Heads, inputs and outputs of each matrix that a layer multiplies its tokens by."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            yield 1, module.in_features, module.out_features
        elif isinstance(module, HeadLinear):
            yield tuple(module.weight.shape)
        elif isinstance(module, Stack):
            yield 1, module.input_size, module.weight_ih_l0.shape[0]


def projections(layer: nn.Module, tokens: int, device: torch.device) -> Callable[[], list[Tensor]]:
    """A function that multiplies as a layer's projections do in both passes, in bfloat16, and does nothing else."""
    operands = []
    for heads, inputs, outputs in _products(layer):
        sizes = ((tokens, inputs), (inputs, outputs), (tokens, outputs))
        operands.append([torch.randn(heads, *each, dtype=torch.bfloat16, device=device) for each in sizes])

    def run() -> list[Tensor]:
        return [y for x, w, dy in operands for y in (x @ w, dy @ w.mT, x.mT @ dy)]

    return run


def op_alone(mixer: Mixer, layer: nn.Module, batch: int, length: int, device: torch.device) -> Callable[[], object]:
    """A function that runs the op inside a layer in both passes, on bfloat16 inputs that need nothing done to them."""
    work = workload(mixer.op)
    sizes = {"B": batch, "T": length, **op_sizes(layer)}
    return one_pass(lambda a: work.call(a, {}, None), work.example(sizes, torch.bfloat16, device, 0, False), grad=True)


def layer_rows(mixer: Mixer, scale: Scale) -> list[Row]:
    """The rows to come: as the model has the layer, and as its constructor makes it."""
    sizes = {"B": scale.batch, "T": scale.length, "d": scale.width}
    modes = ["model"] + (["defaults"] if mixer.defaults else [])
    return [Row("layers", mixer.name, mode, sizes, note=mixer.note) for mode in modes]


def measure_layer(mixer: Mixer, row: Row, scale: Scale, device: torch.device) -> Row:
    """Times of both passes, of projections and op alone, and device time by kind."""
    torch.manual_seed(0)
    with device:
        if row.mode == "defaults" and mixer.defaults:
            layer = mixer.defaults(scale.width)
        else:
            layer = mixer.make(scale.width, scale.head, scale.narrow)
        layer = layer.to(torch.float32)
        x = torch.randn(scale.batch, scale.length, scale.width, dtype=torch.float32)
    run = both_passes(layer, x)
    if not all(tensor.isfinite().all() for tensor in run()):
        return replace(row, status="wrong", detail="not all finite at full size, though right at the checked sizes")
    times, host, note = device_times(run, device)
    kernels = by_kernel(run, device, 2)
    figures = {"layer_ms": times.median_ms, "low_ms": times.low_ms, "high_ms": times.high_ms}
    figures |= {} if host is None else {"host_ms": host}
    if mixer.op:
        figures["projections_ms"] = device_times(projections(layer, scale.batch * scale.length, device), device)[
            0
        ].median_ms
        figures["op_ms"] = device_times(op_alone(mixer, layer, scale.batch, scale.length, device), device)[0].median_ms
        figures["over"] = figures["layer_ms"] / (figures["projections_ms"] + figures["op_ms"])
    note = "; ".join(filter(None, (row.note, times.method, note)))
    return replace(row, note=note, figures=figures, kinds=by_kind(kernels), kernels=longest(kernels))
