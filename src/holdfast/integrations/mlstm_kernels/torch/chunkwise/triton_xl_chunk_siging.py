"""mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging: with a sigmoid input gate."""

import torch
from torch import Tensor

from ...call import check_chunk_size, sequence


def mlstm_siging_chunkwise__xl_chunk(
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
    normalize: bool = True,
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
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """`holdfast.mlstm` with gating="sigmoid", otherwise as `mlstm_chunkwise__xl_chunk`; m_initial has no part in it.

    Returns:
        h [B, H, T, V], and with return_last_states (h, (c, n)); without normalize n is left as it came.
    """
    check_chunk_size(chunk_size)
    given = {"q": q, "k": k, "v": v, "i": i, "f": f, "c_initial": c_initial, "n_initial": n_initial, "m_initial": None}
    h, last = sequence(given, return_last_states, eps, autocast_kernel_dtype, "sigmoid", normalize)
    return h if last is None else (h, last[:2])
