"""For programs with Metal kernels of their own: a cache of built kernels, and the shape rule of a simple one."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from .check import check_count
from .kernel import SIMD_WIDTH


def get_or_build_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> Any:
    """`mx.fast.metal_kernel` of these arguments, built once for each distinct set of them."""
    return _kernel(name, tuple(input_names), tuple(output_names), source, header)


@cache
def _kernel(name: str, input_names: tuple[str, ...], output_names: tuple[str, ...], source: str, header: str) -> Any:
    return mx.fast.metal_kernel(
        name=name, input_names=list(input_names), output_names=list(output_names), source=source, header=header
    )


def check_segment_shape(L: int, seg: int, lane_dim: int, lane_name: str = "lane dimension") -> None:
    """Raises ValueError unless seg divides L and 32 divides lane_dim.

    For kernels that need both. The scans of this package need neither.
    """
    check_count("seg", seg)
    if L % seg:
        raise ValueError(f"L: expected a multiple of seg = {seg}; got {L}")
    if lane_dim % SIMD_WIDTH:
        raise ValueError(f"{lane_name}: expected a multiple of {SIMD_WIDTH}, the lanes of a simdgroup; got {lane_dim}")
