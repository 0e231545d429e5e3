"""Layouts by the letters of their axes, as flashrnn names them."""

from torch import Tensor

# B batch, T time, G gates, H heads, D channels, P channels before the step, S states
INPUT, RECURRENT, BIAS, OUTPUT = "BTGHD", "GHDP", "GHD", "SBTHD"


def turned(x: Tensor, given: str, wanted: str) -> Tensor:
    """x, whose axes are given's letters, with its axes in wanted's order."""
    return x if given == wanted else x.permute([given.index(axis) for axis in wanted])


def check_layout(name: str, layout: str, axes: str) -> None:
    """Raises ValueError unless layout is the letters of axes, in any order."""
    if not isinstance(layout, str) or sorted(layout) != sorted(axes):
        raise ValueError(f"{name}: expected the letters {axes} in some order; got {layout!r}")
