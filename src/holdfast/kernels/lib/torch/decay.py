"""Decays inside and between chunks, without an exponent of a positive number and without cancellation.

A log decay is at least _FLOOR: exp(_FLOOR) is already 0 in float64, and -inf would turn differences into NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOOR = -1e4


def clamp_log(g: Tensor) -> Tensor:
    """g with -inf (a decay of zero) made finite."""
    return g.clamp_min(_FLOOR)


def to_here(g: Tensor) -> Tensor:
    """[..., C, K] -> exp(g_1 + ... + g_t): the decay from the start to each position, that position's own included."""
    return g.cumsum(-2).exp()


def to_before(g: Tensor) -> Tensor:
    """[..., C, K] -> exp(g_1 + ... + g_{t-1}): the decay from the start to each position, its own left out."""
    return to_here(F.pad(g, (0, 0, 1, -1)))


def to_end(g: Tensor) -> Tensor:
    """[..., C, K] -> exp(g_{t+1} + ... + g_C): the decay from each position to the end."""
    # a product sums each row afresh: no large early decay is taken away from a small late one
    return (g.new_ones(g.shape[-2], g.shape[-2]).triu(1) @ g).exp()


def between(g: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: exp(g_{s+1} + ... + g_t) at (t, s) for s <= t, 0 above the diagonal."""
    # sums over any window come from a difference: float64 keeps it exact to float32 beside decays of -1e4 a step
    total = g.double().cumsum(-1)
    window = (total[..., :, None] - total[..., None, :]).to(g.dtype)
    future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu()
    # the diagonal is 1 whatever g: kept apart, its large terms do not cancel in the gradient and drown small ones
    diagonal = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    return window.masked_fill_(future, -torch.inf).exp_() + diagonal


def scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Causal scores under vector decay: [..., C, K] each -> [..., C, C], C a power of two.

    Entry (t, s) is sum_j q_tj k_sj exp(g_{s+1,j} + ... + g_tj) for s <= t, 0 above the diagonal.
    Halves recursively: between a left and a right half, the decay splits at the boundary into a factor of the query and
    one of the key, each the exponential of a sum of log decays.
    """
    *lead, size, width = q.shape
    if size == 1:
        return (q * k).sum(-1, keepdim=True)
    half = size // 2
    left, right = (slice(0, half), slice(half, None))
    # one product forms both sums: from each key to the end of its half, from the start of its half to each query
    ones = g.new_ones(half, half)
    factor = (torch.block_diag(ones.triu(1), ones.tril()) @ g).exp()
    corner = (q[..., right, :] * factor[..., right, :]) @ (k[..., left, :] * factor[..., left, :]).mT

    def halves(x: Tensor) -> Tensor:
        return x.reshape(*lead, 2, half, width)

    blocks = scores(halves(q), halves(k), halves(g))
    top = torch.cat([blocks[..., 0, :, :], torch.zeros_like(corner)], -1)
    return torch.cat([top, torch.cat([corner, blocks[..., 1, :, :]], -1)], -2)
