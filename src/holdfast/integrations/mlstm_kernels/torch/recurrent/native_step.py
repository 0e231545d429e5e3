"""mlstm_kernels.torch.recurrent.native_step."""

import torch
from torch import Tensor

from ...call import States, step


def mlstm_recurrent_step__native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32,
) -> tuple[Tensor, States]:
    """`holdfast.step` of "mlstm" on copies of the states; with gradients `holdfast.mlstm` of one token.

    Args:
        q, k: [B, H, K]. v: [B, H, V]. i, f: [B, H, 1], any floating dtype.
        c, n, m: [B, H, K, V], [B, H, K] and [B, H, 1], any floating dtype.
        dtype_state: of the states that are returned, which are float32 inside (float64 beside float64).

    Returns:
        h [B, H, V] in v's dtype, and (c, n, m) after the token.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message.
    """
    return step({"q": q, "k": k, "v": v, "i": i, "f": f, "c": c, "n": n, "m": m}, eps, dtype_state)
