"""The arguments of `intra_chunk`, for all of its backends."""

from typing import Literal, NamedTuple

from torch import Tensor

Activation = Literal["silu", "sigmoid"]


class IntraChunkCall(NamedTuple):
    """With S the state that enters the chunk of step t, whose first step is c:

    o_t = scale (sum over s = c .. t of exp(g_{s+1} + .. + g_t) (q_t . k_s) v_s + exp(g_c + .. + g_t) S^T q_t),
    times activation(gate_t) where there is a gate.
    """

    q: Tensor  # [B, T, Hq, K], H a multiple of Hq
    k: Tensor  # [B, T, Hq, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None = None  # natural-log decay [B, T, H]
    states: Tensor | None = None  # [B, G, H, K, V], G = T / chunk_size rounded up
    gate: Tensor | None = None  # [B, T, H, V]
    scale: float = 1.0
    chunk_size: int = 64
    gate_activation: Activation = "silu"
