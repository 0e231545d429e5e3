"""Gated DeltaNet: the state decays, then takes the delta rule's write."""

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .delta_rule import BETA, draw_delta
from .example import Draw, Sizes
from .simple_gla import QKV, STATE, constant_decay, default_scale


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[MatrixCall, None]:
    if g.dim() == 1:
        g = constant_decay(g, v)
    scale = default_scale(scale, k)
    return MatrixCall(q, k, v, g, beta, initial_state=initial_state, scale=scale, delta=True), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    return draw_delta(draw, sizes) | {"g": draw.log_decay(sizes.B, sizes.T, sizes.H)}


GATED_DELTA_RULE = Recurrence(
    name="gated_delta_rule",
    family="matrix",
    title="Gated DeltaNet",
    equation="S' = exp(g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t",
    paper="Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464)",
    arguments=QKV | {"g": Argument("natural-log decay, at most 0", ("B T H", "H"), "float")} | BETA | STATE,
    map=_map,
    example=_example,
)
