"""mlstm_kernels.torch.recurrent.native_sequence."""

import torch
from torch import Tensor

from ...call import Result, sequence


def mlstm_recurrent_sequence__native_fw(
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
    dtype_state: torch.dtype = torch.float32,
) -> Result:
    """`mlstm_chunkwise__native_custbw`, with states that come out in dtype_state. Inside they are float32 at every
    token (float64 beside float64), where mlstm_kernels rounds them to dtype_state."""
    given = {"q": q, "k": k, "v": v, "i": i, "f": f}
    given |= {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    h, last = sequence(given, return_last_states, eps)
    return h if last is None else (h, tuple(x.to(dtype_state) for x in last))


mlstm_recurrent_sequence__triton_step_fused_fw = mlstm_recurrent_sequence__native_fw
