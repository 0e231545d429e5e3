"""rwkv7: RWKV-7's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.rwkv7 import RWKV7, STEPS

from . import delta_rules
from .check import prepare


@replayed
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7: S_t = diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T, o_t = scale S_t^T r_t.

    Source: Peng et al. 2025, RWKV-7 (arXiv:2503.14456). a reads the state before its decay.

    Args:
        r: receptances, [B, T, Hq, K], Hq a divisor of H.
        w: natural-log decay of each key channel, at most 0, [B, T, H, K]; any floating dtype.
        k, a, b: keys of the write, of what is read and of where that is written, [B, T, Hq, K].
        v: values, [B, T, H, V].
        scale: multiplies the output.

    The other args, returns and errors are those of `gla`: states float32 [N, H, K, V]; returns o [B, T, H, V] and the
    final state or None.
    """
    arguments = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "initial_state": initial_state}
    given = prepare(RWKV7, cu_seqlens, arguments)
    offsets = None if cu_seqlens is None else cu_seqlens * STEPS
    return delta_rules.run(RWKV7, given, {"scale": scale}, b, output_final_state, offsets, backend)
