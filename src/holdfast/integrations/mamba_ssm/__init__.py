"""mamba_ssm's functions by Holdfast: its names, arguments and layouts."""

from .selective_scan import selective_scan_fn
from .state_update import selective_state_update

__all__ = ["selective_scan_fn", "selective_state_update"]
