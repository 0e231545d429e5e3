"""The chunk primitives as workloads: examples, exact results, calls."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast import ops
from holdfast.kernels.backend import Backend
from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.planner import Problem

from .draw import DeviceDraw


def _module(name: str) -> Any:
    # holdfast.ops binds the function over the module of the same name
    from importlib import import_module

    return import_module(f"holdfast.ops.{name}")


def inter_chunk_example(
    sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str, seed: int, state: bool
) -> dict[str, Any]:
    """states [B, G, H, K, V] and a natural-log decay a chunk and head [B, G, H], about that of 64 steps.

    With Kg = K, a decay for each row of the state too, [B, G, H, K]. With r, W and Y [B, G, H, K, r], small enough for
    the state to stay bounded.
    """
    draw, (B, G, H, K, V) = DeviceDraw(seed, dtype, device), (sizes[axis] for axis in "BGHKV")
    rows, r = sizes.get("Kg", 1), sizes.get("r")
    if rows not in (1, K):
        raise ValueError(f"sizes: expected Kg, the decays a head, to be 1 or K = {K}; got {rows}")
    drawn = {"states": draw.normal(B, G, H, K, V), "decay": 8 * draw.log_decay(B, G, H, *([K] if rows > 1 else []))}
    if r:
        # unit columns over r in all: |W Y^T| is at most 1
        drawn |= {name: draw.unit(B, G, H, r, K).mT.contiguous() * r**-0.5 for name in ("W", "Y")}
    return drawn


def inter_chunk_exact(arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The states after each chunk, one chunk after the other."""
    states, keep = arguments["states"], arguments["decay"].exp()
    keep = keep[..., None, None] if keep.dim() == 3 else keep[..., None]
    W, Y = arguments.get("W"), arguments.get("Y")
    h, out = torch.zeros_like(states[:, 0]), []
    for g in range(states.shape[1]):
        if W is not None and Y is not None:
            h = h - W[:, g] @ (Y[:, g].mT @ h)
        h = keep[:, g] * h + states[:, g]
        out.append(h)
    return torch.stack(out, 1)


def inter_chunk_call(arguments: dict[str, Any], options: dict[str, Any], backend: str) -> Tensor:
    """The op."""
    return ops.inter_chunk_scan(**arguments, **options, backend=backend)[0]


def inter_chunk_backends() -> tuple[Backend, ...]:
    """In the order in which they are tried."""
    return _module("inter_chunk_scan").BACKENDS


def inter_chunk_problem(arguments: dict[str, Any], options: dict[str, Any], grad: bool) -> Problem:
    """What planning knows of the call."""
    return _module("inter_chunk_scan").problem(InterChunkCall(**arguments), None, grad)


def intra_chunk_example(
    sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str, seed: int, state: bool
) -> dict[str, Any]:
    """q, k, v, one decay a step and head, the state that enters each chunk, an output gate; chunks of C steps."""
    draw, (B, T, H, K, V, C) = DeviceDraw(seed, dtype, device), (sizes[axis] for axis in "BTHKVC")
    return {
        "q": draw.normal(B, T, H, K),
        "k": draw.normal(B, T, H, K, scale=K**-0.5),
        "v": draw.normal(B, T, H, V),
        "g": draw.log_decay(B, T, H),
        "states": draw.normal(B, -(-T // C), H, K, V),
        "gate": draw.normal(B, T, H, V),
        "chunk_size": C,
    }


def intra_chunk_exact(arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Chunk by chunk, the decay between two steps as the exponential of a difference of sums, at most 0."""
    q, k, v, g = (arguments[name] for name in "qkvg")
    C, scale, out = arguments["chunk_size"], arguments["k"].shape[3] ** -0.5, []
    for n, start in enumerate(range(0, q.shape[1], C)):
        end = start + C
        total = g[:, start:end].cumsum(1).transpose(1, 2)
        causal = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=q.device).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
        scores = torch.einsum("bthk,bshk->bhts", q[:, start:end], k[:, start:end]) * between
        o = torch.einsum("bhts,bshv->bthv", scores, v[:, start:end])
        read = q[:, start:end] * total.exp().transpose(1, 2)[..., None]
        out.append(o + torch.einsum("bthk,bhkv->bthv", read, arguments["states"][:, n]))
    return scale * torch.cat(out, 1) * torch.nn.functional.silu(arguments["gate"])


def intra_chunk_call(arguments: dict[str, Any], options: dict[str, Any], backend: str) -> Tensor:
    """The op."""
    return ops.intra_chunk(**arguments, **options, backend=backend)


def intra_chunk_backends() -> tuple[Backend, ...]:
    """In the order in which they are tried."""
    return _module("intra_chunk").BACKENDS


def intra_chunk_problem(arguments: dict[str, Any], options: dict[str, Any], grad: bool) -> Problem:
    """What planning knows of the call."""
    return _module("intra_chunk").problem(IntraChunkCall(**arguments), grad)
