"""The full-history forms: every state is kept for the backward pass. The baseline that memory is compared with.

`selective_scan_metal` and `gla_scan_metal` run Metal kernels where Metal runs and the plain loop elsewhere; the chunked
forms are plain mlx, differentiated by mlx. New programs want `ssd_scan` and `gla_scan`. The six names with an
underscore are the two passes by themselves, as mlx-recurrence 0.3.0 has them.
"""

from .gla_scan import (
    _gla_backward_chunked,
    _gla_backward_metal,
    _gla_forward_kernel,
    gla_scan_chunked,
    gla_scan_metal,
)
from .ssm_scan import (
    _ssm_backward_chunked,
    _ssm_backward_metal,
    _ssm_forward_kernel,
    selective_scan_chunked,
    selective_scan_metal,
)

__all__ = [
    "_gla_backward_chunked",
    "_gla_backward_metal",
    "_gla_forward_kernel",
    "_ssm_backward_chunked",
    "_ssm_backward_metal",
    "_ssm_forward_kernel",
    "gla_scan_chunked",
    "gla_scan_metal",
    "selective_scan_chunked",
    "selective_scan_metal",
]
