"""RG-LRU's scan as transformers' RecurrentGemma calls it, in terms of Holdfast's op."""

import torch
from torch import Tensor

from holdfast.ops import rglru

from ..check import wide


def rnn_scan(
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """(h [B, T, D], the state after the last step [B, D]) of hidden_states and recurrent_gate [B, T, D].

    reset: [B, T, 1] bool, where the state is dropped first. acc_dtype is left to the op, which takes float32 or wider.
    """
    dtype = wide(hidden_states.dtype)
    if recurrent_states is not None:
        recurrent_states = recurrent_states.to(hidden_states.device, dtype)
    h, state = rglru(recurrent_gate * ~reset, hidden_states, recurrent_states, True, backend=backend)
    return h.to(hidden_states.dtype), state
