"""DeltaNet: what the state predicts for a key is replaced, by a share beta, with the value."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .scalars import flag
from .simple_gla import QKV, STATE, default_scale, draw_qkv

BETA = {"beta": Argument("write strength, 0 to 1 (to 2 for negative eigenvalues)", "B T H", "float")}
L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, computed in float32 or wider, in x's dtype."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


# q, k, log decay (None for none) and write strength, as the rule takes them
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def check_options(
    A_log: Tensor | None, dt_bias: Tensor | None, qk_l2norm: bool, beta_sigmoid: bool, allow_neg_eigval: bool
) -> None:
    """Raises TypeError for an option that is no bool; ValueError for dt_bias without A_log, and for allow_neg_eigval
    without beta_sigmoid."""
    flag("qk_l2norm", qk_l2norm)
    flag("beta_sigmoid", beta_sigmoid)
    flag("allow_neg_eigval", allow_neg_eigval)
    if dt_bias is not None and A_log is None:
        raise ValueError("dt_bias: expected A_log beside it, since g is a log decay without; got A_log=None")
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval: expected beta_sigmoid=True beside it, since it doubles sigmoid(beta) and takes any "
            "other beta as it comes; got beta_sigmoid=False"
        )


def prepared(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> Inputs:
    """What a layer does to the rule's inputs, in plain differentiable PyTorch.

    Args:
        q, k: [B, T, Hq, K], of one floating dtype; with qk_l2norm each is divided by sqrt(|.|^2 + 1e-6).
        g: log decay [B, T, H] or [H], any floating dtype; None for no decay. With A_log, a step size before its
            softplus: g becomes Mamba-2's gate -exp(A_log) softplus(g + dt_bias).
        beta: write strength [B, T, H], any floating dtype; with beta_sigmoid its sigmoid is taken, and twice that with
            allow_neg_eigval.
        A_log, dt_bias: [H], any floating dtype, or None.

    Returns:
        q, k, g and beta of the same shapes; q and k in their dtype, g and beta as they came or, where they were
        computed, in float32 (float64 beside float64).

    Raises:
        TypeError, ValueError: as `check_options` does.
    """
    check_options(A_log, dt_bias, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    wide = torch.promote_types(q.dtype, torch.float32)
    if A_log is not None:
        g = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias
        g = -A_log.to(wide).exp() * F.softplus(g)
    if beta_sigmoid:
        beta = beta.to(wide).sigmoid()
        beta = 2 * beta if allow_neg_eigval else beta
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    return q, k, g, beta


def draw_delta(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    """Example q, k of length 1, v, beta in (0, 1) and initial state."""
    k = draw.unit(sizes.B, sizes.T, sizes.query_heads, sizes.K)
    return draw_qkv(draw, sizes) | {"k": k, "beta": draw.gate(sizes.B, sizes.T, sizes.H)}


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    inputs_of: Callable[..., Inputs] = prepared,
) -> tuple[MatrixCall, None]:
    scale = default_scale(scale, k)
    q, k, _, beta = inputs_of(q, k, None, beta, None, None, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    return MatrixCall(q, k, v, beta=beta, initial_state=initial_state, scale=scale, delta=True), None


DELTA_RULE = Recurrence(
    name="delta_rule",
    family="matrix",
    title="DeltaNet",
    equation="S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t",
    paper="Schlag et al. 2021 (arXiv:2102.11174); Yang et al. 2024, Parallelizing Linear Transformers with the Delta "
    "Rule (arXiv:2406.06484)",
    arguments=QKV | BETA | STATE,
    map=_map,
    example=draw_delta,
)
