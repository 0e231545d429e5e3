"""Gated DeltaNet: the state decays, then takes the delta rule's write."""

from collections.abc import Callable

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .delta_rule import BETA, Inputs, draw_delta, prepared
from .example import Draw, Sizes
from .simple_gla import QKV, STATE, constant_decay, default_scale

GATE = {
    "A_log": Argument("logarithm of the decay rate; with it g is a step size before its softplus", "H", "float", False),
    "dt_bias": Argument("added to g, beside A_log", "H", "float", required=False),
}


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    inputs_of: Callable[..., Inputs] = prepared,
) -> tuple[MatrixCall, None]:
    q, k, g, beta = inputs_of(q, k, g, beta, A_log, dt_bias, qk_l2norm, beta_sigmoid, allow_neg_eigval)
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
    arguments=QKV | {"g": Argument("natural-log decay, at most 0", ("B T H", "H"), "float")} | BETA | GATE | STATE,
    map=_map,
    example=_example,
)
