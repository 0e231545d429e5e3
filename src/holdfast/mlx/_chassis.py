"""The names of mlx_recurrence._chassis, for programs that import them from there."""

from .chassis import DEFAULT_SEG
from .kernel import SIMD_WIDTH
from .own_kernels import check_segment_shape, get_or_build_kernel
from .parity import parity_check

__all__ = ["DEFAULT_SEG", "SIMD_WIDTH", "check_segment_shape", "get_or_build_kernel", "parity_check"]
