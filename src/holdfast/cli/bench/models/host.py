"""What forward and backward cost the host in eager mode: layers, ops, and attention in the same run."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast import ops

from ..clock import time_calls
from ..measure import one_pass
from .check import both_passes
from .layers import op_alone
from .mixers import Mixer
from .row import Row
from .scale import Scale

# Calls in a block: few, since layers of many kernels fill the device's queue.
CALLS = 5


def _attention(scale: Scale, device: torch.device) -> Callable[[], object]:
    (batch, length), heads = scale.host, scale.width // scale.narrow
    q, k, v = (_normal(device, batch, heads, length, scale.narrow) for _ in range(3))
    return one_pass(lambda a: F.scaled_dot_product_attention(*a, is_causal=True), [q, k, v], grad=True)


def _convolution(scale: Scale, device: torch.device) -> Callable[[], object]:
    x, weight = _normal(device, *scale.host, 3 * scale.width), _normal(device, 3 * scale.width, 4)
    return one_pass(lambda a: ops.causal_conv1d(*a, activation="silu")[0], [x, weight], grad=True)


def _norm(scale: Scale, device: torch.device) -> Callable[[], object]:
    o, gate = (_normal(device, *scale.host, scale.width // scale.head, scale.head) for _ in range(2))
    return one_pass(lambda a: ops.gated_rms_norm(*a), [o, gate, _normal(device, scale.head)], grad=True)


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


# beside the ops of the layers; attention's own is what all is held against
_OTHERS = {"scaled_dot_product_attention": _attention, "causal_conv1d": _convolution, "gated_rms_norm": _norm}


def host_rows(mixer: Mixer, scale: Scale) -> list[Row]:
    """The rows to come: a layer, and the op inside it; with attention, those that several layers share."""
    batch, length = scale.host
    sizes = {"B": batch, "T": length, "d": scale.width}
    ops_ = list(_OTHERS) if mixer.name == "attention" else [mixer.op] if mixer.op else []
    modes = [*(f"op {name}" for name in ops_), "layer"]
    return [Row("host", mixer.name, mode, sizes, note=mixer.note) for mode in modes]


def measure_host(mixer: Mixer, row: Row, scale: Scale, device: torch.device) -> Row:
    """Microseconds of the host for both passes of a layer or an op, the device not waited for."""
    torch.manual_seed(0)
    batch, length = scale.host
    with device:
        layer = mixer.make(scale.width, scale.head, scale.narrow).to(torch.float32)
        x = torch.randn(batch, length, scale.width, dtype=torch.float32)
    op = row.mode.removeprefix("op ")
    if row.mode == "layer":
        run: Callable[[], object] = both_passes(layer, x)
    elif op in _OTHERS:
        run = _OTHERS[op](scale, device)
    else:
        run = op_alone(mixer, layer, batch, length, device)
    times = time_calls(run, device, CALLS)
    figures = {"host_us": times.median_ms * 1e3, "low_us": times.low_ms * 1e3, "high_us": times.high_ms * 1e3}
    return replace(row, figures=figures)
