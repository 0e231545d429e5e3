"""RG-LRU's scan: one real gate a channel and step."""

from torch import Tensor

from .definition import Argument, DiagonalCall, Recurrence
from .example import Draw, Sizes

X = {"x": Argument("inputs", "B T D")}
STATE = {"initial_state": Argument("state before the first step", "sequences D", "state", required=False)}


def _map(a: Tensor, x: Tensor, initial_state: Tensor | None = None) -> tuple[DiagonalCall, None]:
    return DiagonalCall(a, x, initial_state=initial_state), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, D = sizes.B, sizes.T, sizes.D
    return {"a": draw.log_decay(B, T, D).exp(), "x": draw.normal(B, T, D), "initial_state": draw.state(B, D)}


RGLRU = Recurrence(
    name="rglru",
    family="diagonal",
    title="Real-gated linear recurrent unit (the scan alone)",
    equation="h_t = a_t h_{t-1} + x_t",
    paper="De et al. 2024, Griffin (arXiv:2402.19427)",
    arguments=X | {"a": Argument("gate, any real number, of either sign or zero", "B T D", "float")} | STATE,
    map=_map,
    example=_example,
)
