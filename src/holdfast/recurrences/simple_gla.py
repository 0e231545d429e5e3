"""Simple gated linear attention: one decay a head and step."""

import torch
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .scalars import number

QKV = {
    "q": Argument("queries", "B T Hq K"),
    "k": Argument("keys", "B T Hq K"),
    "v": Argument("values", "B T H V"),
}
STATE = {"initial_state": Argument("state before the first step", "sequences H K V", "state", required=False)}


def default_scale(scale: float | None, k: Tensor) -> float:
    """K ** -0.5 unless a scale is given. Raises TypeError for what is no number, ValueError for one not finite."""
    return k.shape[-1] ** -0.5 if scale is None else number("scale", scale)


def constant_decay(g: Tensor, v: Tensor) -> Tensor:
    """A log decay a head [H], repeated for every token of v [B, T, H, V], in float32 at least.

    Its gradient is a sum over all tokens: rounded first, a token's part would be off by more than such a sum may be.
    """
    return g.to(torch.promote_types(g.dtype, torch.float32)).expand(v.shape[:3])


def draw_qkv(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    """Example q, k, v and initial state."""
    B, T, H, K, V, Hq = sizes.B, sizes.T, sizes.H, sizes.K, sizes.V, sizes.query_heads
    return {
        "q": draw.normal(B, T, Hq, K),
        "k": draw.normal(B, T, Hq, K, scale=K**-0.5),
        "v": draw.normal(B, T, H, V),
        "initial_state": draw.state(B, H, K, V),
    }


def map_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[MatrixCall, None]:
    """Arguments as the definition names them; scale defaults to K ** -0.5."""
    if g is not None and g.dim() == 1:
        g = constant_decay(g, v)
    return MatrixCall(q, k, v, g, initial_state=initial_state, scale=default_scale(scale, k)), None


SIMPLE_GLA = Recurrence(
    name="simple_gla",
    family="matrix",
    title="Simple gated linear attention",
    equation="S_t = exp(g_t) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
    paper="Yang et al. 2024, Gated Linear Attention (arXiv:2312.06635), with one decay a head as in "
    "Sun et al. 2024, You Only Cache Once (arXiv:2405.05254)",
    arguments=QKV | {"g": Argument("natural-log decay, at most 0", ("B T H", "H"), "float", required=False)} | STATE,
    map=map_call,
    example=lambda draw, sizes: draw_qkv(draw, sizes) | {"g": draw.log_decay(sizes.B, sizes.T, sizes.H)},
)


def head_numbers(v: Tensor) -> Tensor:
    """0 .. H - 1 [H] in float32 (float64 for float64 values), made on v's device so that CUDA graphs can hold it."""
    return torch.arange(v.shape[2], dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
