"""mamba_ssm's functions by Holdfast: its names, arguments and layouts."""

from .chunk_scan import mamba_chunk_scan_combined
from .gated_norm import RMSNormGated, rmsnorm_fn
from .inner import mamba_inner_fn
from .selective_scan import selective_scan_fn
from .split_scan import mamba_split_conv1d_scan_combined
from .state_update import selective_state_update

__all__ = [
    "RMSNormGated",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_state_update",
]
