"""Mamba-2's three functions as transformers' layers call them, in terms of Holdfast's ops.

Their state is [batch, H, P, N] and Holdfast's [batch, H, N, P]: what goes into the model's cache is a transposed view,
so that the cache, which keeps strides, holds Holdfast's layout and decoding copies nothing.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.ops import ssd, step
from holdfast.ops.check import needs_grad

from ..check import wide

NO_LIMIT = (0.0, math.inf)


def split_conv1d_scan_combined(*arguments: Any, **named: Any) -> None:
    """None, upon which the layer goes on to its convolution and scan, one after the other."""


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    *,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """A prompt, or a batch of training. chunk_size is left to the backend; unused are the model's other keywords.

    seq_idx: [1, T], the number of the packed sequence that a token is of. Raises ValueError for a batch beside it.
    """
    if tuple(dt_limit) != NO_LIMIT:
        dt = dt.to(wide(hidden_states.dtype))
        dt = dt if dt_bias is None else dt + dt_bias
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        dt_bias, dt_softplus = None, False
    if initial_states is not None:
        initial_states = initial_states.to(wide(hidden_states.dtype)).mT.contiguous()
    cu_seqlens = None if seq_idx is None else _offsets(seq_idx)
    y, state = ssd(
        hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_states, True, cu_seqlens, backend=backend
    )
    return (y, state.mT) if return_final_states else y


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    *,
    backend: str | None,
    **unused: Any,
) -> Tensor:
    """One token of decoding: y [batch, H, P]; state [batch, H, P, N] is updated where it lies.

    hidden_states and z [batch, H, P], B and C [batch, G, N]. dt [batch, H, P], A [H, P, N] and dt_bias [H, P] repeat
    one number a head, which is checked by their strides. Raises ValueError where they do not.
    """
    dt, A = _one_a_head("dt", dt, 1), _one_a_head("A", A, 2)
    dt_bias = None if dt_bias is None else _one_a_head("dt_bias", dt_bias, 1)
    inputs = {"x": hidden_states, "dt": dt, "B": B, "C": C, "z": z}
    inputs = {name: None if x is None else x[:, None] for name, x in inputs.items()}
    inputs |= {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    now = state.to(wide(hidden_states.dtype)).mT
    if needs_grad(*(x for x in inputs.values() if isinstance(x, Tensor)), state):
        y, after = ssd(**inputs, initial_state=now, output_final_state=True, backend=backend)
    else:
        after = now.contiguous()
        y = step("ssd", inputs, after, backend)
    state.copy_(after.mT)
    return y[:, 0]


def _offsets(seq_idx: Tensor) -> Tensor:
    """Where each sequence of seq_idx [1, T] starts, and T."""
    if seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx: expected shape [1, T], sequences packed in one row; got {list(seq_idx.shape)}")
    (row,) = seq_idx
    ends = torch.nonzero(row[1:] != row[:-1]).flatten() + 1
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), row.shape[0])])


def _one_a_head(name: str, x: Tensor, repeated: int) -> Tensor:
    """x without its last `repeated` axes, along which it was expanded."""
    if any(size > 1 and stride for size, stride in zip(x.shape[-repeated:], x.stride()[-repeated:], strict=True)):
        raise ValueError(
            f"{name}: expected one number a head, expanded along the last {repeated} axes; got shape {list(x.shape)} "
            f"with strides {list(x.stride())}"
        )
    return x[(..., *(0,) * repeated)]
