"""Checkpoints of flash-linear-attention's layers, which have projections and convolutions of q, k and v apart."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .in_projection import join_projections


def take_fla_names(
    mixer: nn.Module, state: dict[str, Any], prefix: str, projections: tuple[str, ...], renamed: Mapping[str, str]
) -> None:
    """Makes of fla's parameters a mixer's: in_proj, conv and those that have another name alone, if they are in state.

    state: of `load_state_dict`, changed; prefix: of the mixer's keys. projections: in the order of in_proj's rows.
    renamed: fla's name -> the mixer's.
    """
    join_projections(mixer, state, prefix, projections)
    parts = [f"{prefix}{name}_conv1d.weight" for name in "qkv"]
    if all(key in state for key in parts):
        state[f"{prefix}conv.weight"] = torch.cat([state.pop(key) for key in parts])
    for theirs, own in renamed.items():
        if f"{prefix}{theirs}" in state:
            state[f"{prefix}{own}"] = state.pop(f"{prefix}{theirs}")
