"""The chunk primitives by name, for whoever plans calls without making them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.backend import Backend
from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.planner import Problem
from holdfast.recurrences import Draw

from .inter_chunk_scan import BACKENDS as INTER_CHUNK_BACKENDS
from .inter_chunk_scan import problem as inter_chunk_problem
from .intra_chunk import BACKENDS as INTRA_CHUNK_BACKENDS
from .intra_chunk import problem as intra_chunk_problem


@dataclass(frozen=True, slots=True)
class ChunkPrimitive:
    """sizes: axis -> default. problem: (draw, sizes, cu_seqlens, grad) -> what planning knows of such a call."""

    sizes: Mapping[str, int]
    backends: Callable[[], tuple[Backend, ...]]
    problem: Callable[[Draw, Mapping[str, int], Tensor | None, bool], Problem]


def _inter_chunk(draw: Draw, sizes: Mapping[str, int], cu_seqlens: Tensor | None, grad: bool) -> Problem:
    B, G, H, K, V = (sizes[axis] for axis in "BGHKV")
    if sizes["Kg"] not in (1, K):
        raise ValueError(f"sizes: expected Kg, the decays a head, to be 1 or K = {K}; got {sizes['Kg']}")
    decay = draw.log_decay(B, G, H, *([K] if sizes["Kg"] > 1 else []))
    factors = [draw.normal(B, G, H, K, sizes["r"])] * 2 if sizes["r"] else [None, None]
    return inter_chunk_problem(InterChunkCall(draw.normal(B, G, H, K, V), decay, *factors), cu_seqlens, grad)


def _intra_chunk(draw: Draw, sizes: Mapping[str, int], cu_seqlens: Tensor | None, grad: bool) -> Problem:
    if cu_seqlens is not None:
        raise ValueError("varlen: intra_chunk takes no packed sequences; got True")
    B, T, H, K, V, C = (sizes[axis] for axis in "BTHKVC")
    if C < 1:
        raise ValueError(f"sizes: expected C >= 1; got {C}")
    heads = sizes["Hq"] or H
    q = draw.normal(B, T, heads, K)
    v = draw.normal(B, T, H, V)
    states = draw.normal(B, -(-T // C), H, K, V)
    return intra_chunk_problem(IntraChunkCall(q, q, v, draw.log_decay(B, T, H), states, v, 1.0, C), grad)


CHUNK_PRIMITIVES = {
    "inter_chunk_scan": ChunkPrimitive(
        {"B": 2, "G": 8, "H": 2, "K": 16, "V": 24, "Kg": 1, "r": 0}, lambda: INTER_CHUNK_BACKENDS, _inter_chunk
    ),
    "intra_chunk": ChunkPrimitive(
        {"B": 2, "T": 100, "H": 2, "Hq": 0, "K": 16, "V": 24, "C": 64}, lambda: INTRA_CHUNK_BACKENDS, _intra_chunk
    ),
}
