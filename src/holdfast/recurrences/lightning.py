"""Lightning attention: a constant decay a head, weaker in later layers."""

from torch import Tensor

from .definition import MatrixCall, Recurrence
from .simple_gla import QKV, STATE, draw_qkv, head_numbers, map_call


def log_decay(v: Tensor, layer: int, num_layers: int) -> Tensor:
    """-(8 h / H) (1 - layer / num_layers) for head h: [H]."""
    return head_numbers(v) * (-8 / v.shape[2] * (1 - layer / num_layers))


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    layer: int = 0,
    num_layers: int = 1,
    scale: float | None = None,
) -> tuple[MatrixCall, None]:
    return map_call(q, k, v, log_decay(v, layer, num_layers), initial_state, scale)


LIGHTNING = Recurrence(
    name="lightning",
    family="matrix",
    title="Lightning attention",
    equation="S_t = exp(-(8 h / H)(1 - layer / num_layers)) S_{t-1} + k_t v_t^T in head h;  o_t = scale S_t^T q_t",
    paper="Qin et al. 2024, Lightning Attention-2 (arXiv:2401.04658), with the decay of TransNormerLLM "
    "(arXiv:2307.14995)",
    arguments=QKV | STATE,
    map=_map,
    example=draw_qkv,
)
