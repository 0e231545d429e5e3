"""flash-linear-attention's ops by Holdfast: `enable()` for all code that calls them, `ops` by name."""

from .registry import disable, enable

__all__ = ["disable", "enable"]
