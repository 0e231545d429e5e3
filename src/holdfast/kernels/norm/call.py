"""What every backend of the norm and gate of heads' outputs is given."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Activation = Literal["silu", "sigmoid"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


class GatedNormCall(NamedTuple):
    """y = o / sqrt(mean(o^2) + eps) * weight * activation(gate), the mean over the last axis.

    center: o less its own mean takes o's place, which makes it layer normalisation.
    """

    o: Tensor  # [B, T, H, D]
    gate: Tensor | None = None  # [B, T, H, D]
    weight: Tensor | None = None  # [D], shared by the heads, or [H, D]
    eps: float = 1e-5
    activation: Activation = "silu"
    center: bool = False
