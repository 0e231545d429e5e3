"""Gated linear attention: one decay a key channel and step."""

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .simple_gla import QKV, STATE, draw_qkv, map_call


def _map(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, scale: float | None = None
) -> tuple[MatrixCall, None]:
    return map_call(q, k, v, g, initial_state, scale)


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    return draw_qkv(draw, sizes) | {"g": draw.log_decay(sizes.B, sizes.T, sizes.H, sizes.K)}


GLA = Recurrence(
    name="gla",
    family="matrix",
    title="Gated linear attention",
    equation="S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
    paper="Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635)",
    arguments=QKV | {"g": Argument("natural-log decay of each key channel, at most 0", "B T H K", "float")} | STATE,
    map=_map,
    example=_example,
)
