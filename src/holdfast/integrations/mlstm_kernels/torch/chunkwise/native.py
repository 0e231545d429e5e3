"""mlstm_kernels.torch.chunkwise.native."""

import torch
from torch import Tensor

from ...call import Result, check_chunk_size, sequence


def mlstm_chunkwise__native_custbw(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int = 64,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:
    """`holdfast.mlstm` of q, k [B, H, T, K], v [B, H, T, V], i, f [B, H, T], of any T.

    Args:
        c_initial, n_initial, m_initial: [B, H, K, V], [B, H, K] and [B, H, 1], any floating dtype; zeros by default.
        chunk_size: how mlstm_kernels' kernels go about it; checked, not used.
        autocast_kernel_dtype: what q, k and v are cast to under autocast.

    Returns:
        h [B, H, T, V] in v's dtype, and with return_last_states (h, (c, n, m)), float32 (float64 beside float64).
        Gradients go through all.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message.
    """
    check_chunk_size(chunk_size)
    given = {"q": q, "k": k, "v": v, "i": i, "f": f}
    given |= {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    h, last = sequence(given, return_last_states, eps, autocast_kernel_dtype)
    return h if last is None else (h, last)


def mlstm_chunkwise__native_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int = 64,
    *,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:
    """`mlstm_chunkwise__native_custbw`."""
    return mlstm_chunkwise__native_custbw(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, chunk_size, autocast_kernel_dtype
    )
