"""Sequence mixers for mlx around four of the scans: `layer(x, state) -> (y, state)`, and `layer.step` for decoding."""

from .gla import GLA
from .mamba2 import Mamba2
from .rglru import RGLRU
from .rotlru import RotLRU

__all__ = ["GLA", "RGLRU", "Mamba2", "RotLRU"]
