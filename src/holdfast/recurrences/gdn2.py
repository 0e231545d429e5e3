"""Gated DeltaNet 2: a delta rule that erases by channels of the key and writes by channels of the value."""

from collections.abc import Callable

from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .delta_rule import Inputs, prepared
from .example import Draw, Sizes
from .kda import GATE, log_decay
from .simple_gla import QKV, STATE, default_scale, draw_qkv


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    lower_bound: float | None = None,
    inputs_of: Callable[..., Inputs] = prepared,
    decay_of: Callable[..., Tensor] = log_decay,
) -> tuple[MatrixCall, None]:
    g, scale = decay_of(g, A_log, dt_bias, lower_bound), default_scale(scale, k)
    q, k, _, _ = inputs_of(q, k, None, b, None, None, qk_l2norm, False, False)
    # a gate for each head of v, on the key that its group shares; rounded once, to the inputs' dtype
    erase = (b.unflatten(2, (k.shape[2], -1)) * k[:, :, :, None]).flatten(2, 3).to(k.dtype)
    written = (w * v).to(v.dtype)
    return MatrixCall(q, k, written, g, initial_state=initial_state, e=erase, scale=scale, delta=True), None


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, H, K = sizes.B, sizes.T, sizes.H, sizes.K
    gates = {"g": draw.log_decay(B, T, H, K), "b": draw.gate(B, T, H, K), "w": draw.gate(B, T, H, sizes.V)}
    return draw_qkv(draw, sizes) | {"k": draw.unit(B, T, sizes.query_heads, K)} | gates


GDN2 = Recurrence(
    name="gdn2",
    family="matrix",
    title="Gated DeltaNet 2",
    equation="S' = diag(exp(g_t)) S_{t-1};  S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T;  o_t = scale S_t^T q_t",
    paper="flash-linear-attention's ops/gdn2 (2026), after Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464)",
    arguments=QKV
    | {
        "g": Argument("natural-log decay of each key channel, at most 0", "B T H K", "float"),
        "b": Argument("erase gate of each key channel, 0 to 1 (to 2 for negative eigenvalues)", "B T H K", "float"),
        "w": Argument("write gate of each value channel, 0 to 1", "B T H V", "float"),
    }
    | GATE
    | STATE,
    map=_map,
    example=_example,
)
