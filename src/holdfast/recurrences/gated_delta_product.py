"""Gated DeltaProduct: several delta rules' writes a token, the first of them after the token's decay."""

import math
from collections.abc import Callable

from torch import Tensor

from .definition import Argument, Finish, MatrixCall, Recurrence
from .delta_rule import Inputs, prepared
from .example import Draw, Sizes
from .gated_delta_rule import GATE
from .micro_steps import at_first, at_last, last_of
from .simple_gla import STATE, default_scale


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    inputs_of: Callable[..., Inputs] = prepared,
) -> tuple[MatrixCall, Finish]:
    steps, scale = k.shape[2], default_scale(scale, k)
    k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
    if g is None and A_log is not None:
        raise TypeError("g: expected a tensor [B, T, H] beside A_log; got None")
    q = at_last(q, steps)
    if g is not None:
        # what the gate makes no decay of
        g = at_first(g, steps, 0.0 if A_log is None else -math.inf)
    q, k, g, beta = inputs_of(q, k, g, beta, A_log, dt_bias, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    call = MatrixCall(q, k, v, g, beta, initial_state=initial_state, scale=scale, delta=True)
    return call, lambda o, state: (last_of(o, steps), state)


def _example(draw: Draw, sizes: Sizes, steps: int = 2) -> dict[str, Tensor]:
    B, T, H, K, Hq = sizes.B, sizes.T, sizes.H, sizes.K, sizes.query_heads
    return {
        "q": draw.normal(B, T, Hq, K),
        "k": draw.unit(B, T, steps, Hq, K),
        "v": draw.normal(B, T, steps, H, sizes.V),
        "g": draw.log_decay(B, T, H),
        "beta": draw.gate(B, T, steps, H),
        "initial_state": draw.state(B, H, K, sizes.V),
    }


GATED_DELTA_PRODUCT = Recurrence(
    name="gated_delta_product",
    family="matrix",
    title="Gated DeltaProduct",
    equation="S_t = W_tn ... W_t1 (exp(g_t) S_{t-1}), W_ti S = S + beta_ti k_ti (v_ti - S^T k_ti)^T;  "
    "o_t = scale S_t^T q_t",
    paper="Siems et al. 2025, DeltaProduct (arXiv:2502.10297)",
    arguments={
        "q": Argument("queries", "B T Hq K"),
        "k": Argument("keys of a token's n writes", "B T n Hq K"),
        "v": Argument("values of a token's n writes", "B T n H V"),
        "g": Argument("natural-log decay of a token, at most 0", "B T H", "float", required=False),
        "beta": Argument("write strengths, 0 to 1 (to 2 for negative eigenvalues)", "B T n H", "float"),
    }
    | GATE
    | STATE,
    map=_map,
    example=_example,
)
