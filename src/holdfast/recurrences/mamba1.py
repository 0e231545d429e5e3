"""Mamba-1's selective scan: a state of N numbers a channel, each with a decay rate of its own."""

from torch import Tensor

from .definition import Argument, Recurrence, SelectiveCall
from .example import Draw, Sizes
from .scalars import flag


def _map(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[SelectiveCall, None]:
    flag("dt_softplus", dt_softplus)
    B, C = (part if part.dim() == 4 else part[:, :, None] for part in (B, C))
    return SelectiveCall(x, dt, A, B, C, D, z, dt_bias, initial_state, dt_softplus), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, D, N = sizes.B, sizes.T, sizes.D, sizes.N
    return {
        "x": draw.normal(B, T, D),
        "dt": draw.gate(B, T, D),
        "A": -draw.gate(D, N),
        "B": draw.normal(B, T, N),
        "C": draw.normal(B, T, N, scale=N**-0.5),
        "D": draw.normal(D),
        "z": draw.normal(B, T, D),
        "dt_bias": draw.gate(D),
        "initial_state": draw.state(B, D, N),
    }


MAMBA1 = Recurrence(
    name="mamba1",
    family="selective",
    title="Selective scan (Mamba-1)",
    equation="S_dn = exp(dt_d A_dn) S_dn + dt_d B_n x_d;  y_d = (sum_n C_n S_dn + D_d x_d) silu(z_d)",
    paper="Gu, Dao 2023, Mamba (arXiv:2312.00752)",
    arguments={
        "x": Argument("inputs", "B T D"),
        "dt": Argument("step sizes; dt_bias is added, then softplus taken where dt_softplus asks", "B T D", "float"),
        "A": Argument("natural-log decay rate a unit of dt, negative", "D N", "float"),
        "B": Argument("writes; D a multiple of G, which is 1 where left out", ("B T G N", "B T N")),
        "C": Argument("reads", ("B T G N", "B T N")),
        "D": Argument("skip weight", "D", "float", required=False),
        "z": Argument("output gate, before its SiLU", "B T D", required=False),
        "dt_bias": Argument("added to dt", "D", "float", required=False),
        "initial_state": Argument("state before the first step", "sequences D N", "state", required=False),
    },
    map=_map,
    example=_example,
)
