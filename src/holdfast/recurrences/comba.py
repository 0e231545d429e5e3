"""Comba: a gated delta rule that erases by another key than it writes by, from the state before its decay."""

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .delta_rule import l2_normalize
from .example import Draw, Sizes
from .scalars import flag
from .simple_gla import QKV, STATE, default_scale, draw_qkv


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[MatrixCall, None]:
    scale = default_scale(scale, k)
    if flag("qk_l2norm", qk_l2norm):
        q, k, p = l2_normalize(q), l2_normalize(k), l2_normalize(p)
    return MatrixCall(
        q, k, v, g, beta, None, initial_state, p, scale, delta=True, erase_before_decay=True
    ), None  # fmt: skip


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, H, K = sizes.B, sizes.T, sizes.H, sizes.K
    k = draw.unit(B, T, sizes.query_heads, K)
    # as the layer has it: the key, a share a head
    p = k * draw.gate(sizes.query_heads)[:, None]
    found = draw_qkv(draw, sizes) | {"k": k, "p": p}
    return found | {"g": draw.log_decay(B, T, H), "beta": draw.gate(B, T, H)}


COMBA = Recurrence(
    name="comba",
    family="matrix",
    title="Comba",
    equation="S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T;  o_t = scale S_t^T q_t",
    paper="Hu et al. 2025, Comba: Improving Bilinear RNNs with Closed-loop Control (arXiv:2506.02475)",
    arguments=QKV
    | {
        "p": Argument("erase keys", "B T Hq K"),
        "g": Argument("natural-log decay, at most 0", "B T H", "float"),
        "beta": Argument("strength of erase and write, 0 to 1; 1 by default", "B T H", "float", required=False),
    }
    | STATE,
    map=_map,
    example=_example,
)
