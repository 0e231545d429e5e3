"""mlstm_kernels.torch.parallel.native."""

import torch
from torch import Tensor

from ...call import check_chunk_size, sequence
from .without_states import without_states


def mlstm_parallel__native_custbw(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: None = None,
    n_initial: None = None,
    m_initial: None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    autocast_kernel_dtype: torch.dtype = torch.float32,
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """`holdfast.mlstm`, as `mlstm_chunkwise__native_custbw`; initial states and last ones are refused, as there.

    Returns:
        h [B, H, T, V]. eps stands beside exp(-m) of an m from 0 on, which changes h by a factor of 1 + eps at most.
    """
    check_chunk_size(chunk_size)
    given = without_states(q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states)
    return sequence(given, False, eps, autocast_kernel_dtype)[0]


def mlstm_parallel__native_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: None = None,
    n_initial: None = None,
    m_initial: None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    *,
    autocast_kernel_dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
) -> Tensor:
    """`mlstm_parallel__native_custbw`."""
    return mlstm_parallel__native_custbw(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, autocast_kernel_dtype,
        chunk_size=chunk_size,
    )  # fmt: skip
