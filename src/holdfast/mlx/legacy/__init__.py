"""The full-history forms: every state is kept for the backward pass. The baseline that memory is compared with.

`selective_scan_metal` and `gla_scan_metal` run Metal kernels where Metal runs and the plain loop elsewhere; the chunked
forms are plain mlx, differentiated by mlx. New programs want `ssd_scan` and `gla_scan`.
"""

from .gla import gla_scan_chunked, gla_scan_metal
from .selective import selective_scan_chunked, selective_scan_metal

__all__ = ["gla_scan_chunked", "gla_scan_metal", "selective_scan_chunked", "selective_scan_metal"]
