"""The causal-conv1d package's functions by Holdfast: its names, arguments and layouts."""

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
