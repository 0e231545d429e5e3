"""Delta rules with more keys than one a token, a step at a time in float64: as exact_matrix has the others."""

from typing import Any

import torch
from torch import Tensor

from .exact_matrix import channels_kept, per_value_head, scale_of, unit
from .rows import Rows

# of a step: the state before it -> the state behind it
Change = Any


def _walk(rows: Rows, read: Tensor, v: Tensor, state: Tensor | None, change: Change) -> tuple[Tensor, Tensor]:
    """change(t, S) for each token, then o = read . S. read: [rows, T, H, K], scaled."""
    width = read.shape[-1]
    S = v.new_zeros(rows.count, v.shape[2], width, v.shape[-1]) if state is None else state

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        S = change(t, state[0])
        return (S,), torch.einsum("nhk,nhkv->nhv", read[:, t], S)

    o, (S,) = rows.walk((S,), step, rows.split(v)[:, :0] if rows.cu else v[:, :0])
    return o, S


def gdn2(
    rows: Rows,
    q,
    k,
    v,
    g,
    b,
    w,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    qk_l2norm=False,
    lower_bound=None,
):
    kept = rows.split(channels_kept(g, A_log, dt_bias, lower_bound))
    q, k = (unit(q), unit(k)) if qk_l2norm else (q, k)
    read, key, b, written = (
        rows.split(x)
        for x in (per_value_head(q, v.shape[2]) * scale_of(k, scale), per_value_head(k, v.shape[2]), b, w * v)
    )

    def change(t: int, S: Tensor) -> Tensor:
        # (I - k (b k)^T) diag(kept) S + k (w v)^T
        S = kept[:, t, :, :, None] * S
        erased = ((b[:, t] * key[:, t])[..., None] * S).sum(-2)
        return S + key[:, t, :, :, None] * (written[:, t] - erased)[:, :, None, :]

    return _walk(rows, read, v, initial_state, change)


def comba(rows: Rows, q, k, v, p, g, beta=None, initial_state=None, scale=None, qk_l2norm=False):
    q, k, p = (unit(q), unit(k), unit(p)) if qk_l2norm else (q, k, p)
    heads, scale = v.shape[2], scale_of(k, scale)
    strength = torch.ones_like(g) if beta is None else beta
    read, key, p, value, kept, strength = (
        rows.split(x)
        for x in (
            *(per_value_head(q, heads) * scale, per_value_head(k, heads), per_value_head(p, heads)),
            *(v, torch.exp(g), strength),
        )
    )

    def change(t: int, S: Tensor) -> Tensor:
        # the closed loop: what is fed back is of the state before it decays
        error = value[:, t] - (p[:, t, :, :, None] * S).sum(-2)
        return kept[:, t, :, None, None] * S + (strength[:, t, :, None] * key[:, t])[..., None] * error[:, :, None, :]

    return _walk(rows, read, v, initial_state, change)


def gated_delta_product(
    rows: Rows,
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    qk_l2norm=False,
    beta_sigmoid=False,
    allow_neg_eigval=False,
):
    if A_log is not None:
        g = -torch.exp(A_log) * torch.nn.functional.softplus(g if dt_bias is None else g + dt_bias)
    if beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    q, k = (unit(q), unit(k)) if qk_l2norm else (q, k)
    heads, scale = v.shape[3], scale_of(k, scale)
    key = rows.split(k.repeat_interleave(heads // k.shape[3], 3))
    read, value, strength, kept = (
        rows.split(x) for x in (per_value_head(q, heads) * scale, v, beta, torch.exp(g).expand(v.shape[0], -1, heads))
    )

    def change(t: int, S: Tensor) -> Tensor:
        S = kept[:, t, :, None, None] * S
        for n in range(key.shape[2]):
            k, v, beta = key[:, t, n], value[:, t, n], strength[:, t, n]
            S = S + (beta[..., None] * k)[..., None] * (v - (k[..., None] * S).sum(-2))[:, :, None, :]
        return S

    return _walk(rows, read, v[:, :, 0], initial_state, change)


def rwkv7(rows: Rows, r, w, k, v, a, b, initial_state=None, scale=1.0):
    heads = v.shape[2]
    read, key, a, b = (rows.split(per_value_head(x, heads)) for x in (r, k, a, b))
    kept, value = rows.split(torch.exp(w)), rows.split(v)

    def change(t: int, S: Tensor) -> Tensor:
        found = (a[:, t, :, :, None] * S).sum(-2)
        return (
            kept[:, t, :, :, None] * S
            + b[:, t, :, :, None] * found[:, :, None, :]
            + key[:, t, :, :, None] * value[:, t, :, None, :]
        )

    return _walk(rows, scale * read, v, initial_state, change)
