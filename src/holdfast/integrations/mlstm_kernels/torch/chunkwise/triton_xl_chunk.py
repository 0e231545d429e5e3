"""mlstm_kernels.torch.chunkwise.triton_xl_chunk."""

import torch
from torch import Tensor

from ...call import Result
from .native import mlstm_chunkwise__native_custbw


def mlstm_chunkwise__xl_chunk(
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
    chunk_size: int = 128,
    chunk_size_inter: int | None = None,
    chunk_size_intra: int | None = None,
    siz_b_L_parallel: int | None = None,
    siz_b_L_loop: int | None = None,
    siz_b_DH_parallel: int | None = None,
    siz_b_DH_loop: int | None = None,
    num_warps_intra: int | None = None,
    num_warps_inter: int | None = None,
    num_stages_intra: int | None = None,
    num_stages_inter: int | None = None,
    recompute_states_in_bw: bool = True,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:
    """`mlstm_chunkwise__native_custbw`; sizes, warps, stages and what is recomputed are mlstm_kernels' kernels' own."""
    return mlstm_chunkwise__native_custbw(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, chunk_size, autocast_kernel_dtype
    )
