"""gated_delta_product: Gated DeltaProduct's state update."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.gated_delta_product import GATED_DELTA_PRODUCT
from holdfast.recurrences.scalars import integer

from . import delta_rules
from .check import prepare
from .delta_inputs import fastest_inputs


@replayed
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct: n writes of `delta_rule` a token, after the token's decay; read after the last.

    Source: Siems et al. 2025, DeltaProduct (arXiv:2502.10297).

    Args:
        q: queries, [B, T, Hq, K].
        k, v, beta: of a token's n writes, [B, T, n, Hq, K], [B, T, n, H, V] and [B, T, n, H]; with num_householder, of
            all tokens' one behind another, [B, T * n, Hq, K], [B, T * n, H, V] and [B, T * n, H].
        g: natural-log decay of a token, at most 0, [B, T, H], any floating dtype; None for no decay.
        num_householder: n, where k, v and beta have no axis of it.
        cu_seqlens: offsets of sequences in tokens, not in writes.

    The other args, returns and errors are those of `gated_delta_rule`: states float32 [N, H, K, V]; returns o
    [B, T, H, V] and the final state or None.
    """
    if num_householder is not None:
        k, v, beta = (_by_token(name, x, num_householder) for name, x in (("k", k), ("v", v), ("beta", beta)))
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    given = prepare(GATED_DELTA_PRODUCT, cu_seqlens, arguments | {"initial_state": initial_state})
    options = {"qk_l2norm": qk_l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}
    options |= {"scale": scale, "inputs_of": fastest_inputs(given["q"])}
    offsets = None if cu_seqlens is None else cu_seqlens * given["k"].shape[2]
    return delta_rules.run(GATED_DELTA_PRODUCT, given, options, k, output_final_state, offsets, backend)


def _by_token(name: str, x: Tensor, steps: int) -> Tensor:
    """x [B, T * steps, ...] as [B, T, steps, ...]."""
    if integer("num_householder", steps) < 1:
        raise ValueError(f"num_householder: expected a positive integer; got {steps}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor; got {type(x).__name__}")
    if x.dim() < 2 or x.shape[1] % steps:
        raise ValueError(f"{name}: expected shape [B, T * {steps}, ...]; got {list(x.shape)}")
    return x.unflatten(1, (x.shape[1] // steps, steps))
