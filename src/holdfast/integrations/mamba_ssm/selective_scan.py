"""mamba_ssm's selective_scan_fn: Mamba-1's scan of [batch, D, T]."""

import torch
from torch import Tensor

from holdfast import ops
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

_ARGUMENTS = {
    "u": Argument("inputs", "B D T"),
    "delta": Argument("step sizes", "B D T", "float"),
    "A": Argument("natural-log decay rate a unit of delta", "D N", "float"),
    "B": Argument("writes", ("B G N T", "B N T")),
    "C": Argument("reads", ("B G N T", "B N T")),
    "D": Argument("skip weight", "D", "float", required=False),
    "z": Argument("output gate, before its SiLU", "B D T", required=False),
    "delta_bias": Argument("added to delta", "D", "float", required=False),
}


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`holdfast.mamba1` of u [batch, D, T], which is read fastest where its channels lie side by side.

    Args:
        delta: [batch, D, T], any floating dtype; delta_bias [D] is added first, softplus taken if delta_softplus.
        A: [D, N], any floating dtype, real.
        B, C: [batch, N, T], or [batch, G, N, T], of u's dtype; not constant in time.
        D: [D], any floating dtype.
        z: [batch, D, T], of u's dtype.

    Returns:
        y [batch, D, T] in u's dtype, its channels side by side, and with return_last_state (y, state [batch, D, N] in
        float32, float64 beside float64), through which gradients go too.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message.
    """
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
    u, delta, A, B, C, D, z, delta_bias = check_arguments(_ARGUMENTS, None, given).values()
    flag("delta_softplus", delta_softplus)
    flag("return_last_state", return_last_state)
    y, state = ops.mamba1(
        u.mT, delta.mT, A, _time_first(B), _time_first(C), D, None if z is None else z.mT, delta_bias, delta_softplus,
        output_final_state=return_last_state,
    )  # fmt: skip
    return y.mT if state is None else (y.mT, state)


def _time_first(x: Tensor) -> Tensor:
    """[batch, ..., N, T] -> [batch, T, ..., N]."""
    return torch.movedim(x, -1, 1)
