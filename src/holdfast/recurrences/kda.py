"""Kimi Delta Attention: each key channel of the state decays by itself, then comes the delta rule's write."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .delta_rule import BETA, Inputs, draw_delta, prepared
from .example import Draw, Sizes
from .scalars import number
from .simple_gla import QKV, STATE, default_scale

GATE = {
    "A_log": Argument("logarithm of the decay rate; with it g is what the gate takes", "H", "float", required=False),
    "dt_bias": Argument("added to g, in a gate", "H K", "float", required=False),
}


def check_gate(A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> float | None:
    """Return the bound of KDA's gate as a float.

    Raises TypeError for a lower_bound that is no number; ValueError for one that is not below 0, and for dt_bias where
    neither A_log nor lower_bound makes a gate.
    """
    bound = None if lower_bound is None else number("lower_bound", lower_bound)
    if bound is not None and bound >= 0:
        raise ValueError(f"lower_bound: expected a number below 0, the least log decay; got {bound}")
    if A_log is None and bound is None and dt_bias is not None:
        raise ValueError(
            "dt_bias: expected A_log or lower_bound beside it, since g is a log decay without; got neither"
        )
    return bound


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """KDA's gate: the log decay [B, T, H, K] of g [B, T, H, K], in float32 (float64 beside float64).

    -exp(A_log) softplus(g + dt_bias); with lower_bound, a number below 0, lower_bound sigmoid(exp(A_log) (g +
    dt_bias)), in which A_log may be None for a rate of 1. A_log: [H]. dt_bias: [H, K], or None for 0. Without A_log and
    lower_bound g is the log decay itself, and comes back as it is. Raises as `check_gate` does.
    """
    bound = check_gate(A_log, dt_bias, lower_bound)
    if A_log is None and bound is None:
        return g
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    if dt_bias is not None:
        g = g + dt_bias
    rate = None if A_log is None else A_log.to(g.dtype).exp()[:, None]
    if bound is None:
        return -rate * F.softplus(g)
    return bound * (g if rate is None else rate * g).sigmoid()


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
    lower_bound: float | None = None,
    inputs_of: Callable[..., Inputs] = prepared,
    decay_of: Callable[..., Tensor] = log_decay,
) -> tuple[MatrixCall, None]:
    g = decay_of(g, A_log, dt_bias, lower_bound)
    scale = default_scale(scale, k)
    q, k, _, beta = inputs_of(q, k, None, beta, None, None, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    return MatrixCall(q, k, v, g, beta, initial_state=initial_state, scale=scale, delta=True), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    return draw_delta(draw, sizes) | {"g": draw.log_decay(sizes.B, sizes.T, sizes.H, sizes.K)}


KDA = Recurrence(
    name="kda",
    family="matrix",
    title="Kimi Delta Attention",
    equation="S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t",
    paper="Kimi Team 2025, Kimi Linear (arXiv:2510.26692)",
    arguments=QKV
    | {"g": Argument("natural-log decay of each key channel, at most 0", "B T H K", "float")}
    | BETA
    | GATE
    | STATE,
    map=_map,
    example=_example,
)
