"""The flashrnn package's function by Holdfast: its name, arguments and layouts."""

from .call import flashrnn
from .config import FlashRNNConfig

__all__ = ["FlashRNNConfig", "flashrnn"]
