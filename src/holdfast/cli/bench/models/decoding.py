"""One token through a stack of layers with their states, eager and as a CUDA graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import nn as hnn
from holdfast.ops.parity import leaves
from holdfast.recurrences.torch_private import tree_leaves

from ...attention import with_room
from ..clock import time_runs
from .attention import Attention
from .mixers import Mixer
from .row import Row
from .scale import Scale

# Tokens that a state comes from, which need not be many where its size does not depend on them.
PREFIX = 16


def decoding_rows(mixer: Mixer, scale: Scale, device: torch.device) -> list[Row]:
    """The rows to come, by batch: each step called from Python, and on a GPU replayed from a CUDA graph."""
    modes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    sizes = {"layers": scale.decode_layers, "d": scale.decode_width}
    return [
        Row("decoding", mixer.name, mode, {"B": B, **sizes}, note=mixer.note)
        for B in scale.decode_batches
        for mode in modes
        if mixer.steps
    ]


@torch.no_grad()
def _states(layers: list[nn.Module], x: Tensor) -> list[Any]:
    states = []
    for layer in layers:
        _, state = layer(x)
        states.append(with_room(state, 1) if isinstance(layer, Attention) else state)
    return states


def decode_step(layers: list[nn.Module], x: Tensor, states: list[Any]) -> Callable[[], Tensor]:
    """A function that takes x [B, 1, d] through all layers, each beside its residual, and leaves the new states in the
    memory of the given ones, as a graph that is replayed needs them: by a layer's own step, or by a copy."""

    @torch.no_grad()
    def run() -> Tensor:
        y = x
        for layer, state in zip(layers, states, strict=True):
            if isinstance(layer, hnn.step.Mixer):
                y = y + layer.step(y, state)
                continue
            out, new = layer(y, state)
            for old, now in zip(_tensors(state), _tensors(new), strict=True):
                if now.data_ptr() != old.data_ptr():
                    old.copy_(now)
            y = y + out
        return y

    return run


def _tensors(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


def measure_decoding(mixer: Mixer, row: Row, scale: Scale, device: torch.device) -> Row:
    """Milliseconds and tokens a second of a step, weights and activations in bfloat16; bytes of weights and states."""
    torch.manual_seed(0)
    batch = row.sizes["B"]
    with device:
        layers = [
            mixer.make(scale.decode_width, scale.head, scale.narrow).to(torch.bfloat16)
            for _ in range(scale.decode_layers)
        ]
        length = scale.context - 1 if mixer.name == "attention" else PREFIX
        before, token = (torch.randn(batch, T, scale.decode_width, dtype=torch.bfloat16) for T in (length, 1))
    states = _states(layers, before)
    run = decode_step(layers, token, states)
    if not run().isfinite().all():
        return replace(row, status="wrong", detail="the output is not finite")
    times = time_runs(run, device, "graph" if row.mode == "graph" else "events")
    weights = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    held = sum(x.numel() * x.element_size() for x in leaves(states))
    figures = {
        "step_ms": times.median_ms,
        "low_ms": times.low_ms,
        "high_ms": times.high_ms,
        "tokens_per_s": batch / (times.median_ms / 1e3),
        "weights_bytes": weights,
        "states_bytes": held,
    }
    return replace(row, figures=figures, note="; ".join(filter(None, (row.note, times.method))))
