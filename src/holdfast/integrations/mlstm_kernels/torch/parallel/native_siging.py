"""mlstm_kernels.torch.parallel.native_siging: with a sigmoid input gate."""

import torch
from torch import Tensor

from ...call import check_chunk_size, sequence
from .without_states import without_states


def mlstm_siging_parallel__native_custbw(
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
    stable_fgate: bool = True,
    normalize: bool = True,
    autocast_kernel_dtype: torch.dtype = torch.float32,
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """`holdfast.mlstm` with gating="sigmoid", otherwise as `mlstm_parallel__native_custbw`; sums of forget gates are
    over windows, whatever stable_fgate says."""
    check_chunk_size(chunk_size)
    given = without_states(q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states)
    return sequence(given, False, eps, autocast_kernel_dtype, "sigmoid", normalize)[0]


def mlstm_siging_parallel__native_autograd(
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
    stable_fgate: bool = True,
    normalize: bool = True,
    *,
    autocast_kernel_dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
) -> Tensor:
    """`mlstm_siging_parallel__native_custbw`."""
    return mlstm_siging_parallel__native_custbw(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, stable_fgate, normalize,
        autocast_kernel_dtype, chunk_size=chunk_size,
    )  # fmt: skip
