"""What a mixer projects its input to, as one matrix product."""

from typing import Any

import torch
from torch import nn

from .projection import Projection

# a projected token takes whole pieces of so many numbers: memory is read 16 bytes at a time
PIECE = 16


class InProjection(Projection):
    """x W^T for all that a mixer makes of x, side by side: it reads x once, and its gradient is one product.

    widths: of each part in its order. The last rows of the weight, up to the next multiple of 16, start as 0; nothing
    reads what they give, and their gradient is 0.
    """

    def __init__(self, d_model: int, widths: list[int]) -> None:
        self.used = sum(widths)
        super().__init__(d_model, -(-self.used // PIECE) * PIECE)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight[self.used :].zero_()


def join_projections(mixer: nn.Module, state: dict[str, Any], prefix: str, names: tuple[str, ...]) -> None:
    """Makes in_proj's weight of those that a mixer's projections had under names of their own, if they are in state.

    state: of `load_state_dict`, changed; prefix: of the mixer's keys. names: in the order of the rows.
    """
    keys = [f"{prefix}{name}.weight" for name in names]
    if all(key in state for key in keys):
        rows = [state.pop(key) for key in keys]
        unused = mixer.in_proj.weight.shape[0] - mixer.in_proj.used
        state[f"{prefix}in_proj.weight"] = torch.cat([*rows, rows[0].new_zeros(unused, rows[0].shape[1])])
