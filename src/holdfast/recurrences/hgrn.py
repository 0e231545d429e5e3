"""HGRN's scan: one decay a channel and step, given as a natural logarithm."""

from torch import Tensor

from .definition import Argument, DiagonalCall, Recurrence
from .example import Draw, Sizes
from .rglru import STATE, X


def _map(x: Tensor, g: Tensor, initial_state: Tensor | None = None) -> tuple[DiagonalCall, None]:
    return DiagonalCall(g, x, initial_state=initial_state, log=True), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, D = sizes.B, sizes.T, sizes.D
    return {"x": draw.normal(B, T, D), "g": draw.log_decay(B, T, D), "initial_state": draw.state(B, D)}


HGRN = Recurrence(
    name="hgrn",
    family="diagonal",
    title="Hierarchically gated recurrent network (the scan alone)",
    equation="h_t = exp(g_t) h_{t-1} + x_t",
    paper="Qin et al. 2023, Hierarchically Gated Recurrent Neural Network (arXiv:2311.04823)",
    arguments=X | {"g": Argument("natural-log decay, at most 0", "B T D", "float")} | STATE,
    map=_map,
    example=_example,
)
