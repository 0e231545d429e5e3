"""causal_conv1d.causal_conv1d_varlen: the states that sequences packed along one axis leave behind."""

import torch
from torch import Tensor

from holdfast.integrations.integers import check_integers
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument

__all__ = ["causal_conv1d_varlen_states"]

_ARGUMENTS = {"x": Argument("inputs", "T D", "float")}


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last inputs of each sequence, zeros in front of those of a shorter one. Nothing is read on the host.

    Args:
        x: [T, D].
        cu_seqlens: int32 or int64 [sequences + 1], offsets of the sequences.
        state_len: how many inputs, at least 1.

    Returns:
        [sequences, D, state_len] in x's dtype, channels side by side. Gradients go through it.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message.
    """
    x = check_arguments(_ARGUMENTS, None, {"x": x})["x"]
    count = len(cu_seqlens) if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else 0
    check_integers("cu_seqlens", cu_seqlens, x, **{"sequences + 1": max(count, 1)})
    if not isinstance(state_len, int) or isinstance(state_len, bool) or state_len < 1:
        raise ValueError(f"state_len: expected a positive int; got {state_len!r}")
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    places = ends - state_len + torch.arange(state_len, dtype=torch.int64, device=x.device)
    # one row more, of zeros, for what is in front of a sequence
    rows = torch.where(places >= starts, places, len(x))
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[rows].mT
