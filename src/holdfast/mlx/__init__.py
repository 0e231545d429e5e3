"""The MLX front end: six scans as fused Metal kernels, for Apple silicon. Imports mlx, and never torch.

Where Metal does not run, the same functions run plain mlx with the same gradients; `choose_path()` says which. Names
and signatures are those of the package mlx-recurrence 0.3.0, so that a program written for it runs here; what is added
comes after them, as keyword arguments.
"""

from . import needs_mlx  # noqa: F401 - before what imports mlx

# isort: split
from . import _chassis, legacy, nn
from .chassis import DEFAULT_SEG, Scan, choose_path
from .delta import (
    gated_delta_scan,
    gated_delta_scan_reference,
    gated_delta_scan_with_state,
    gated_delta_step,
    kda_scan,
    kda_scan_reference,
    kda_scan_with_state,
    kda_step,
)
from .gla import gla_scan, gla_scan_reference, gla_scan_with_state, gla_step
from .kernel import Kernel
from .legacy import gla_scan_chunked, gla_scan_metal, selective_scan_chunked, selective_scan_metal
from .own_kernels import check_segment_shape, get_or_build_kernel
from .parity import parity_check
from .rglru import rglru_scan, rglru_scan_reference, rglru_scan_with_state, rglru_step
from .rotlru import rotlru_scan, rotlru_scan_reference, rotlru_scan_with_state, rotlru_step
from .ssd import ssd_scan, ssd_scan_reference, ssd_scan_with_state, ssd_step

# that of holdfast, which may not be installed
__version__ = "0.1.0"

__all__ = [
    "DEFAULT_SEG",
    "Kernel",
    "Scan",
    "__version__",
    "_chassis",
    "check_segment_shape",
    "choose_path",
    "gated_delta_scan",
    "gated_delta_scan_reference",
    "gated_delta_scan_with_state",
    "gated_delta_step",
    "get_or_build_kernel",
    "gla_scan",
    "gla_scan_chunked",
    "gla_scan_metal",
    "gla_scan_reference",
    "gla_scan_with_state",
    "gla_step",
    "kda_scan",
    "kda_scan_reference",
    "kda_scan_with_state",
    "kda_step",
    "legacy",
    "nn",
    "parity_check",
    "rglru_scan",
    "rglru_scan_reference",
    "rglru_scan_with_state",
    "rglru_step",
    "rotlru_scan",
    "rotlru_scan_reference",
    "rotlru_scan_with_state",
    "rotlru_step",
    "selective_scan_chunked",
    "selective_scan_metal",
    "ssd_scan",
    "ssd_scan_reference",
    "ssd_scan_with_state",
    "ssd_step",
]
