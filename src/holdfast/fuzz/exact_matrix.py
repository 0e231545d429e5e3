"""The matrix recurrences a step at a time in float64, as their pages in docs/recurrences state them.

Written apart from `holdfast.recurrences`, so that one mistake does not stand in both. Arguments are float64 tensors by
the names of the pages; each function returns the output and the parts of the final state.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import Rows


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """Query or group heads [.., Hq, K], each repeated for the value heads that it serves."""
    return x.repeat_interleave(heads // x.shape[2], 2)


def additive(
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | None,
    strength: Tensor | None,
    scale: float,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S = factor S + strength k v^T, o = scale S^T q. factor: [B, T, H] or, a key channel, [B, T, H, K]."""
    heads = v.shape[2]
    q, k, v = (rows.split(x) for x in (per_value_head(q, heads) * scale, per_value_head(k, heads), v))
    if strength is not None:
        k = k * rows.split(strength)[..., None]
    if factor is not None:
        factor = rows.split(factor)
        factor = factor[..., None, None] if factor.dim() == 3 else factor[..., None]
    S = v.new_zeros(rows.count, heads, k.shape[-1], v.shape[-1]) if state is None else state
    qs, ks, vs = q[..., None, :].unbind(1), k[..., None].unbind(1), v[..., None, :].unbind(1)
    fs = None if factor is None else factor.unbind(1)

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        (S,) = state
        S = (S if fs is None else fs[t] * S) + ks[t] * vs[t]
        return (S,), (qs[t] @ S)[..., 0, :]

    o, (S,) = rows.walk((S,), step, v[:, :0])
    return o, S


def scale_of(k: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(k.shape[-1]) if scale is None else scale


def linear_attention(rows: Rows, q: Tensor, k: Tensor, v: Tensor, initial_state=None, scale=None):
    return additive(rows, q, k, v, None, None, scale_of(k, scale), initial_state)


def retnet(rows: Rows, q: Tensor, k: Tensor, v: Tensor, initial_state=None, scale=None):
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(v.shape[2])], dtype=v.dtype, device=v.device)
    return additive(rows, q, k, v, gamma.expand(v.shape[:3]), None, scale_of(k, scale), initial_state)


def lightning(rows: Rows, q: Tensor, k: Tensor, v: Tensor, initial_state=None, scale=None, layer=0, num_layers=1):
    heads = v.shape[2]
    rates = [math.exp(-(8 * h / heads) * (1 - layer / num_layers)) for h in range(heads)]
    kept = torch.tensor(rates, dtype=v.dtype, device=v.device).expand(v.shape[:3])
    return additive(rows, q, k, v, kept, None, scale_of(k, scale), initial_state)


def simple_gla(rows: Rows, q: Tensor, k: Tensor, v: Tensor, g=None, initial_state=None, scale=None):
    kept = None if g is None else g.exp().expand(v.shape[:3])
    return additive(rows, q, k, v, kept, None, scale_of(k, scale), initial_state)


def gla(rows: Rows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state=None, scale=None):
    return additive(rows, q, k, v, g.exp(), None, scale_of(k, scale), initial_state)


def ssd(rows: Rows, x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_state=None, dt_softplus=False):
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    kept = torch.exp(dt * A if A.dim() == 1 else dt[..., None] * A)
    y, S = additive(rows, C, B, x, kept, dt, 1.0, initial_state)
    if D is not None:
        y = y + (D[:, None] if D.dim() == 1 else D) * x
    if z is not None:
        y = y * (z * torch.sigmoid(z))
    return y, S


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _delta(rows: Rows, q, k, v, decay, beta, scale, state, qk_l2norm, beta_sigmoid, allow_neg_eigval):
    if beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    if qk_l2norm:
        q, k = unit(q), unit(k)
    heads = v.shape[2]
    q, k, v, beta = (rows.split(x) for x in (per_value_head(q, heads) * scale, per_value_head(k, heads), v, beta))
    qs, ks, columns = q[..., None, :].unbind(1), k[..., None, :].unbind(1), k[..., None].unbind(1)
    vs, strengths = v[..., None, :].unbind(1), beta[..., None, None].unbind(1)
    if decay is not None:
        # of a head, or of each row of the state
        decay = rows.split(decay if decay.dim() == 4 else decay[..., None])
    decays = None if decay is None else decay[..., None].unbind(1)
    S = v.new_zeros(rows.count, heads, k.shape[-1], v.shape[-1]) if state is None else state

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        (S,) = state
        if decays is not None:
            S = decays[t] * S
        S = S + columns[t] * (strengths[t] * (vs[t] - ks[t] @ S))
        return (S,), (qs[t] @ S)[..., 0, :]

    o, (S,) = rows.walk((S,), step, v[:, :0])
    return o, S


def delta_rule(
    rows: Rows,
    q,
    k,
    v,
    beta,
    initial_state=None,
    scale=None,
    qk_l2norm=False,
    beta_sigmoid=False,
    allow_neg_eigval=False,
):
    options = qk_l2norm, beta_sigmoid, allow_neg_eigval
    return _delta(rows, q, k, v, None, beta, scale_of(k, scale), initial_state, *options)


def gated_delta_rule(
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
        g = -torch.exp(A_log) * F.softplus(g if dt_bias is None else g + dt_bias)
    decay = torch.exp(g).expand(v.shape[:3])
    options = qk_l2norm, beta_sigmoid, allow_neg_eigval
    return _delta(rows, q, k, v, decay, beta, scale_of(k, scale), initial_state, *options)


def channels_kept(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The factor of each key channel [B, T, H, K], by KDA's gates."""
    moved = g if dt_bias is None else g + dt_bias
    rate = 1.0 if A_log is None else torch.exp(A_log)[:, None]
    if lower_bound is not None:
        g = lower_bound * torch.sigmoid(rate * moved)
    elif A_log is not None:
        g = -rate * F.softplus(moved)
    return torch.exp(g)


def kda(
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
    lower_bound=None,
):
    decay = channels_kept(g, A_log, dt_bias, lower_bound)
    options = qk_l2norm, beta_sigmoid, allow_neg_eigval
    return _delta(rows, q, k, v, decay, beta, scale_of(k, scale), initial_state, *options)


def mlstm(
    rows: Rows, q, k, v, i, f, C=None, n=None, m=None, gating="exp", normalize=True, scale=None, eps=1e-6
) -> tuple[Tensor, ...]:
    heads, scale = v.shape[2], scale_of(k, scale)
    q, k, v, i, f = (rows.split(x) for x in (per_value_head(q, heads), per_value_head(k, heads), v, i, F.logsigmoid(f)))
    shape = rows.count, heads, k.shape[-1]
    if C is None:
        C, n, m = v.new_zeros(*shape, v.shape[-1]), v.new_zeros(shape), v.new_zeros(shape[:2])
    qs, ks, vs, writes, kept = (x.unbind(1) for x in (q, k, v, i, f))

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        C, n, m = state
        if gating == "exp":
            top = torch.maximum(kept[t] + m, writes[t])
            a, w, floor = torch.exp(kept[t] + m - top), torch.exp(writes[t] - top), torch.exp(-top)
        else:
            top, a, w, floor = m, torch.exp(kept[t]), torch.sigmoid(writes[t]), torch.ones_like(m)
        C = a[..., None, None] * C + (w[..., None] * ks[t])[..., None] * vs[t][..., None, :]
        h = scale * (qs[t][..., None, :] @ C)[..., 0, :]
        if normalize:
            n = a[..., None] * n + w[..., None] * ks[t]
            h = h / (torch.maximum((scale * (n * qs[t]).sum(-1)).abs(), floor) + eps)[..., None]
        return (C, n, top), h

    h, state = rows.walk((C, n, m), step, v[:, :0])
    return h, *state
