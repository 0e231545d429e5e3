"""What every backend of the short convolution is given."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Activation = Literal["silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
# of y [B, T, D]; None for zeros; or of its parts side by side, q and k [B, T, heads / 2, head_dim] and v, contiguous
Gradient = Tensor | tuple[Tensor, Tensor, Tensor] | None


class ConvCall(NamedTuple):
    """y_t = activation(sum_j weight[:, j] * x_{t - W + 1 + j} + bias), each channel by itself.

    The inputs before a sequence's first are those of initial_state, zeros without one. The first `heads` heads of
    head_dim channels, a layer's queries and then its keys, are divided by sqrt(|.|^2 + 1e-6) afterwards.
    """

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W], the last column for the present token
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, W - 1, D], oldest first
    activation: str = ""  # "" for none
    heads: int = 0
    head_dim: int = 0
