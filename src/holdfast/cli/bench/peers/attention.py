"""Softmax attention on the same q, k and v: not the same function, but what these recurrences stand in for."""

from typing import Any

import torch
import torch.nn.functional as F

from ..case import Case
from ..subject import Refused, Subject


def _softmax_attention(a: dict[str, Any]) -> torch.Tensor:
    scores = a["q"] @ a["k"].mT * a["k"].shape[-1] ** -0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ a["v"]


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """Layout [B, H, T, D]; PyTorch picks its fastest kernel."""
    given = case.arguments(device)
    if given["q"].shape[2] != given["v"].shape[2]:
        raise Refused("q and k have fewer heads than v")
    inputs = {name: given[name].transpose(1, 2).contiguous() for name in "qkv"}

    def call(a: dict[str, Any]) -> torch.Tensor:
        return F.scaled_dot_product_attention(a["q"], a["k"], a["v"], is_causal=True)

    return Subject(inputs, call, _softmax_attention, "softmax attention, another function")
