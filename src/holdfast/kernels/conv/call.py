"""What every backend of the short convolution is given."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Activation = Literal["silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


class ConvCall(NamedTuple):
    """y_t = activation(sum_j weight[:, j] * x_{t - W + 1 + j} + bias), each channel by itself.

    The inputs before a sequence's first are those of initial_state, zeros without one.
    """

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W], the last column for the present token
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, W - 1, D], oldest first
    activation: str = ""  # "" for none
