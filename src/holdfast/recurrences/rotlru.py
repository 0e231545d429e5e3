"""The rotational LRU: each pair of channels is scaled and turned by an angle of its own at each step."""

from torch import Tensor

from .definition import Argument, DiagonalCall, Recurrence
from .example import Draw, Sizes
from .rglru import STATE


def _map(a: Tensor, theta: Tensor, x: Tensor, initial_state: Tensor | None = None) -> tuple[DiagonalCall, None]:
    return DiagonalCall(a, x, theta, initial_state), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, D = sizes.B, sizes.T, sizes.D
    pairs = (B, T, D // 2)
    return {
        "a": draw.log_decay(*pairs).exp(),
        "theta": draw.normal(*pairs).to(draw.state_dtype),
        "x": draw.normal(B, T, D),
        "initial_state": draw.state(B, D),
    }


ROTLRU = Recurrence(
    name="rotlru",
    family="diagonal",
    title="Rotational linear recurrent unit",
    equation="h_t = a_t e^(i theta_t) h_{t-1} + x_t on pairs: channels 2j and 2j + 1 are the real and imaginary part",
    paper="Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences (arXiv:2303.06349), with a "
    "magnitude and an angle a step",
    arguments={
        "x": Argument("inputs, pairs of neighbouring channels, D even", "B T D"),
        "a": Argument("magnitude of each pair's gate, any real number", "B T D/2", "float"),
        "theta": Argument("angle of each pair's gate, radians", "B T D/2", "float"),
    }
    | STATE,
    map=_map,
    example=_example,
)
