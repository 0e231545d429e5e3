"""State space duality, Mamba-2's layer: linear attention with step sizes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
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
) -> tuple[MatrixCall, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    flag("dt_softplus", dt_softplus)
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    g = dt * A if A.dim() == 1 else dt[..., None] * A

    def finish(o: Tensor, final_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if D is not None:
            o = o + (D if D.dim() == 2 else D[:, None]) * x
        if z is not None:
            o = o * F.silu(z.to(wide))
        return o.to(x.dtype), final_state

    return MatrixCall(C, B, x, g, beta=dt, initial_state=initial_state), finish


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, H, N, P, G = sizes.B, sizes.T, sizes.H, sizes.K, sizes.V, sizes.query_heads
    return {
        "x": draw.normal(B, T, H, P),
        "dt": draw.gate(B, T, H),
        "A": -draw.gate(H),
        "B": draw.normal(B, T, G, N),
        "C": draw.normal(B, T, G, N, scale=N**-0.5),
        "D": draw.normal(H),
        "z": draw.normal(B, T, H, P),
        "dt_bias": draw.gate(H),
        "initial_state": draw.state(B, H, N, P),
    }


SSD = Recurrence(
    name="ssd",
    family="matrix",
    title="State space duality (Mamba-2)",
    equation="S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T;  y_t = (S_t^T C_t + D x_t) silu(z_t)",
    paper="Dao, Gu 2024, Transformers are SSMs (arXiv:2405.21060)",
    arguments={
        "x": Argument("inputs", "B T H P"),
        "dt": Argument("step sizes; dt_bias is added, then softplus taken where dt_softplus asks", "B T H", "float"),
        "A": Argument("natural-log decay rate a unit of dt, negative", ("H", "H N"), "float"),
        "B": Argument("writes, H a multiple of G", "B T G N"),
        "C": Argument("reads", "B T G N"),
        "D": Argument("skip weight", ("H", "H P"), "float", required=False),
        "z": Argument("output gate, before its SiLU", "B T H P", required=False),
        "dt_bias": Argument("added to dt", "H", "float", required=False),
        "initial_state": Argument("state before the first step", "sequences H N P", "state", required=False),
    },
    map=_map,
    example=_example,
)
