"""DeltaNet: what the state predicts for a key is replaced, by a share beta, with the value."""

import torch
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .simple_gla import QKV, STATE, default_scale, draw_qkv

BETA = {"beta": Argument("write strength, 0 to 1 (to 2 for negative eigenvalues)", "B T H", "float")}
L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, computed in float32 or wider, in x's dtype."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def write_strength(beta: Tensor, q: Tensor, beta_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """beta as the rule takes it: as it comes, sigmoid(beta), or 2 sigmoid(beta) with allow_neg_eigval.

    Raises ValueError for allow_neg_eigval without beta_sigmoid, since a strength that comes as it is needs no doubling.
    """
    if not beta_sigmoid:
        if allow_neg_eigval:
            raise ValueError(
                "allow_neg_eigval: expected beta_sigmoid=True beside it, since it doubles sigmoid(beta) and takes any "
                "other beta as it comes; got beta_sigmoid=False"
            )
        return beta
    beta = beta.to(torch.promote_types(q.dtype, torch.float32)).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


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
) -> tuple[MatrixCall, None]:
    scale = default_scale(scale, k)
    beta = write_strength(beta, q, beta_sigmoid, allow_neg_eigval)
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
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
