"""DeltaNet: what the state predicts for a key is replaced, by a share beta, with the value."""

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .simple_gla import QKV, STATE, default_scale, draw_qkv

BETA = {"beta": Argument("write strength, 0 to 1 (to 2 for negative eigenvalues)", "B T H", "float")}


def draw_delta(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    """Example q, k of length 1, v, beta in (0, 1) and initial state."""
    k = draw.unit(sizes.B, sizes.T, sizes.query_heads, sizes.K)
    return draw_qkv(draw, sizes) | {"k": k, "beta": draw.gate(sizes.B, sizes.T, sizes.H)}


def _map(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None, scale: float | None = None
) -> tuple[MatrixCall, None]:
    scale = default_scale(scale, k)
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
