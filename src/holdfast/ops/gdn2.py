"""gdn2: Gated DeltaNet 2's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.gdn2 import GDN2

from . import delta_rules
from .check import prepare
from .delta_inputs import fastest_inputs
from .kda_gate import fastest_log_decay


@replayed
def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """GDN-2: S' = diag(exp(g_t)) S_{t-1}, S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T, o_t = scale S_t^T q_t.

    Source: flash-linear-attention's ops/gdn2. With b and w of one number a token and head it is `kda`.

    Args:
        b: erase gate of each key channel, [B, T, H, K]; any floating dtype.
        w: write gate of each value channel, [B, T, H, V]; any floating dtype.

    The other args, returns and errors are those of `kda`: q, k [B, T, Hq, K], v [B, T, H, V], g [B, T, H, K], A_log
    [H], dt_bias [H, K], states float32 [N, H, K, V]; returns o [B, T, H, V] and the final state or None.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "b": b, "w": w, "A_log": A_log, "dt_bias": dt_bias}
    given = prepare(GDN2, cu_seqlens, arguments | {"initial_state": initial_state})
    options = {"inputs_of": fastest_inputs(given["q"]), "decay_of": fastest_log_decay(given["g"])}
    options |= {"scale": scale, "qk_l2norm": qk_l2norm, "lower_bound": lower_bound}
    return delta_rules.run(GDN2, given, options, k, output_final_state, cu_seqlens, backend)
