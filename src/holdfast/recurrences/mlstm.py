"""mLSTM: a matrix memory with an input and a forget gate, and a normaliser."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Argument, MatrixCall, Recurrence
from .example import Draw, Sizes
from .packing import packed_beside
from .scalars import number
from .simple_gla import QKV, default_scale, draw_qkv

State = tuple[Tensor, Tensor, Tensor]
Gating = Literal["exp", "sigmoid"]
Gates = tuple[Tensor, Tensor, Tensor, Tensor]


def stabilizer(log_f: Tensor, i: Tensor, m: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(log_f_t + m_{t-1}, i_t) along the T of [B, T, H], from m [N, H] at each sequence's start.

    Returns m_t and m_{t-1} [B, T, H] and the last m of each sequence [N, H]. Doubles the window each round, so that
    T steps take log2(T) rounds; sums run over windows only, hence lose nothing on long sequences.
    """
    length = i.shape[1]
    if length == 0:
        return i, i, m
    first, entry = _entries(i, m, cu_seqlens)
    best = torch.where(first, torch.maximum(i, log_f + entry), i)
    # no window reaches back over a first step; finite, because -inf - -inf is NaN
    window = torch.where(first, -1e30, log_f)
    shift = 1
    while shift < length:
        reach = torch.maximum(best[:, shift:], best[:, :-shift] + window[:, shift:])
        best = torch.cat([best[:, :shift], reach], 1)
        window = torch.cat([window[:, :shift], window[:, shift:] + window[:, :-shift]], 1)
        shift *= 2
    before = torch.where(first, entry, F.pad(best[:, :-1], (0, 0, 1, 0)))
    if cu_seqlens is None:
        return best, before, best[:, -1]
    cu_seqlens = cu_seqlens.to(i.device)
    empty = (cu_seqlens[1:] == cu_seqlens[:-1])[:, None]
    return best, before, torch.where(empty, m, best[0, (cu_seqlens[1:] - 1).clamp(0, length - 1)])


def _entries(like: Tensor, m: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether a token of like [B, T, H] is its sequence's first [1, T, 1], and m [N, H] at the starts by token."""
    steps = torch.arange(like.shape[1], dtype=torch.int64, device=like.device)
    if cu_seqlens is None:
        return (steps == 0)[None, :, None], m[:, None]
    cu_seqlens, sequence = packed_beside(like, cu_seqlens)
    return (steps == cu_seqlens[sequence])[None, :, None], m[sequence][None]


def gates(
    i: Tensor, f: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, exponential: bool, wide: torch.dtype
) -> Gates:
    """Pre-activations [B, T, H] and the stabiliser at each start m [N, H], None for 0 -> log decay g, write strength,
    stabiliser [B, T, H] and the last m [N, H], of dtype wide.

    What the stabiliser changes of decays and strengths is a change of unit, which has no gradient (MatrixCall). The m
    at a start is the unit of the state there, and so one more log decay of the first token.
    """
    if m is None:
        sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        m = i.new_zeros(sequences, i.shape[2], dtype=wide)
    # float64: stabilised decays are differences of numbers that may be large beside them
    log_f, i = F.logsigmoid(f.double()), i.double()
    if not exponential:
        # a copy: what an op returns is no argument of it
        return log_f.to(wide), i.sigmoid().to(wide), torch.zeros_like(i, dtype=wide), m.clone()
    here, before, last = stabilizer(log_f, i, m.double(), cu_seqlens)
    by = (before - here).detach()
    if m.requires_grad and i.shape[1]:
        first, entry = _entries(i, m.double(), cu_seqlens)
        # 0 where it is finite
        by = by + torch.where(first, (entry - entry.detach()).nan_to_num(0.0), 0.0)
    return (log_f + by).to(wide), (i - here.detach()).exp().to(wide), here.to(wide), last.to(wide, copy=True)


def _map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    initial_state: State | None = None,
    gating: Gating = "exp",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    gates_of: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, bool], Gates] | None = None,
) -> tuple[MatrixCall, Callable[[Tensor, Tensor | None], tuple[Tensor, State | None]]]:
    wide = torch.promote_types(v.dtype, torch.float32)
    state, n, first = initial_state or (None, None, None)
    g, beta, m, last = (gates_of or partial(gates, wide=wide))(i, f, first, cu_seqlens, gating == "exp")
    if normalize and state is not None:
        state = torch.cat([state, n[..., None]], -1)

    def finish(o: Tensor, final: Tensor | None) -> Any:
        if final is None:
            return o, None
        if normalize:
            return o, (final[..., :-1], final[..., -1], last)
        return o, (final, final.new_zeros(final.shape[:3]) if n is None else n.clone(), last)

    unit, scale, eps = m if normalize else None, default_scale(scale, k), number("eps", eps, 0)
    return MatrixCall(q, k, v, g, beta, unit, state, scale=scale, eps=eps), finish


def _example(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    example = draw_qkv(draw, sizes)
    B, T, H, K = sizes.B, sizes.T, sizes.H, sizes.K
    state = (example["initial_state"], draw.state(B, H, K), draw.state(B, H))
    return example | {"i": draw.normal(B, T, H), "f": draw.normal(B, T, H) + 3, "initial_state": state}


MLSTM = Recurrence(
    name="mlstm",
    family="matrix",
    title="mLSTM",
    equation="m_t = max(logsigmoid(f_t) + m_{t-1}, i_t);  S_t = exp(logsigmoid(f_t) + m_{t-1} - m_t) S_{t-1} + "
    "exp(i_t - m_t) k_t v_t^T;  n_t likewise with 1 for v_t;  "
    "h_t = scale S_t^T q_t / (max(|scale n_t . q_t|, exp(-m_t)) + eps)",
    paper="Beck et al. 2024, xLSTM (arXiv:2405.04517); the sigmoid gate: Beck et al. 2025, Tiled Flash Linear "
    "Attention (arXiv:2503.14376)",
    arguments=QKV
    | {
        "i": Argument("input gate, pre-activation", "B T H", "float"),
        "f": Argument("forget gate, pre-activation", "B T H", "float"),
        "initial_state": (
            Argument("matrix state C", "sequences H K V", "state", required=False),
            Argument("normaliser n", "sequences H K", "state", required=False),
            Argument("stabiliser m", "sequences H", "state", required=False),
        ),
    },
    map=_map,
    example=_example,
)
