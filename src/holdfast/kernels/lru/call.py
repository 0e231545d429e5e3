"""What every backend of the gates of the linear recurrent units is given."""

from typing import NamedTuple

from torch import Tensor


class Gates(NamedTuple):
    """What the gates are made of: P numbers of a head's state, C channels of u, where C is P or, of pairs, 2 P.

    In `gates` [B, T, H, S] and `bias` [H, S], the first P columns are r's, the next C i's, and the last P, where there
    is a phase, the angle's.
    """

    u: Tensor  # [B, T, H * C], inputs of the recurrence
    gates: Tensor  # [B, T, H, S], before their bias and activation
    bias: Tensor  # [H, S]
    rate: Tensor  # [H * P], Lambda
    phase: Tensor | None  # [H * P], theta_0, radians
    decay_scale: float  # c

    @property
    def splits(self) -> list[int]:
        heads = self.bias.shape[0]
        numbers, channels = self.rate.shape[0] // heads, self.u.shape[2] // heads
        return [numbers, channels] + ([] if self.phase is None else [numbers])
