"""Retention: a constant decay a head."""

import torch
from torch import Tensor

from .definition import MatrixCall, Recurrence
from .simple_gla import QKV, STATE, draw_qkv, head_numbers, map_call


def log_decay(v: Tensor, first_head: int = 0) -> Tensor:
    """log(1 - 2^(-5 - h)) for head h: [H]. first_head: the number of v's first head."""
    return torch.log1p(-torch.exp2(-5 - first_head - head_numbers(v)))


def _map(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None, scale: float | None = None
) -> tuple[MatrixCall, None]:
    return map_call(q, k, v, log_decay(v), initial_state, scale)


RETNET = Recurrence(
    name="retnet",
    family="matrix",
    title="Retention (RetNet)",
    equation="S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T in head h;  o_t = scale S_t^T q_t",
    paper="Sun et al. 2023, Retentive Network (arXiv:2307.08621)",
    arguments=QKV | STATE,
    map=_map,
    example=draw_qkv,
)
