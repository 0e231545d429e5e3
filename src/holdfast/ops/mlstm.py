"""mlstm: the matrix memory of xLSTM."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.mlstm import MLSTM, Gates, Gating, State, gates
from holdfast.recurrences.scalars import flag

from . import matrix
from .check import prepare
from .mlstm_gates import can_fuse, fused_gates


@replayed
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    gating: Gating = "exp",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State | None]:
    """mLSTM, with exponential input gate and stabiliser (gating="exp"):

        m_t = max(logsigmoid(f_t) + m_{t-1}, i_t),  a_t = exp(logsigmoid(f_t) + m_{t-1} - m_t),  w_t = exp(i_t - m_t)
        C_t = a_t C_{t-1} + w_t k_t v_t^T,  n_t = a_t n_{t-1} + w_t k_t
        h_t = scale C_t^T q_t / (max(|scale n_t . q_t|, exp(-m_t)) + eps)

    or with a sigmoid input gate (gating="sigmoid"): a_t = sigmoid(f_t), w_t = sigmoid(i_t), 1 for exp(-m_t), m unused.

    Source: Beck et al. 2024, xLSTM (arXiv:2405.04517), eq. 19 to 27; the sigmoid gate, eps and the place of exp(-m):
    Beck et al. 2025, Tiled Flash Linear Attention (arXiv:2503.14376).

    Args:
        q, k: [B, T, Hq, K]; v: [B, T, H, V], of q's dtype.
        i, f: input and forget gate, pre-activations [B, T, H], any floating dtype.
        normalize: whether to divide; False (only with gating="sigmoid") gives h_t = scale C_t^T q_t and leaves n as
            it came.
        scale: K ** -0.5 by default.
        initial_state: (C [N, H, K, V], n [N, H, K], m [N, H]), float32 (float64 for float64 inputs); zeros by default.
        output_final_state, cu_seqlens, backend: as in `simple_gla`.

    Returns:
        h [B, T, H, V] in v's dtype, and the final (C, n, m) or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for an unknown
            gating or a backend that is unknown or cannot serve the call.
    """
    check_gating(gating, normalize)
    arguments = {"q": q, "k": k, "v": v, "i": i, "f": f, "initial_state": initial_state}
    given = prepare(MLSTM, cu_seqlens, arguments)
    options = {"gating": gating, "normalize": normalize, "scale": scale, "eps": eps, "cu_seqlens": cu_seqlens}
    gates_of = fastest_gates(given["i"], given["f"], torch.promote_types(given["v"].dtype, torch.float32))
    mapped = MLSTM.map(**given, **options, gates_of=gates_of)
    return matrix.run(MLSTM, mapped, output_final_state, cu_seqlens, backend)


def check_gating(gating: Gating, normalize: bool) -> None:
    """Raises ValueError for an unknown gating, or for one whose states have to be normalised; TypeError for a normalize
    that is no bool."""
    flag("normalize", normalize)
    if gating not in ("exp", "sigmoid"):
        raise ValueError(f"gating: expected 'exp' or 'sigmoid'; got {gating!r}")
    if gating == "exp" and not normalize:
        raise ValueError("normalize: expected True with gating='exp', whose states are scaled by exp(-m); got False")


def fastest_gates(i: Tensor, f: Tensor, wide: torch.dtype) -> Callable[..., Gates]:
    """recurrences.mlstm.gates of i and f [B, T, H], in one launch or two where kernels run. wide: the states' dtype."""
    return fused_gates if can_fuse(i, f, wide) else partial(gates, wide=wide)
