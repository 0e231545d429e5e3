"""What a span of tokens does to a state, and how two spans in a row are one: the mathematics of every cut through time.

A recurrence whose step is linear in its state, S_t = A_t S_{t-1} + w_t, is so over a span as well: the state behind it
is (A_T ... A_1) S_0 plus what the span itself wrote. Those two, the carry and what is added, are the span's summary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """What a span adds to a state, and how it carries one through. Without carry it is a state.

    All tensors have the states' dtype, float32 or float64. N counts the sequences.

    added: [N, H, K, V] of a matrix recurrence, [N, D] of a diagonal one: the state behind the span, from zeros.
    carry: what the state before the span is multiplied by, by its shape
        [N, H]        a factor a head: linear attention, retnet, lightning, simple_gla, ssd, mlstm;
        [N, H, K]     a factor a key channel: gla, ssd with A [H, N];
        [N, H, K, K]  a matrix, from the left: all others with a delta rule's write;
        [N, D]        a factor a channel: rglru, hgrn;
        [N, D/2, 2]   a complex factor a pair of channels, real and imaginary part: rotlru.
    unit: [N, H] of mlstm with exponential gates, else None. added [N, H, K, V + 1], whose last column is the
        normaliser, is then in units of exp(unit), and carry [N, H] the natural logarithm of the factor, since that
        may be smaller than any float and still count. unit is minus infinity where nothing was written.
    """

    added: Tensor
    carry: Tensor | None = None
    unit: Tensor | None = None


def merge(earlier: Summary, later: Summary) -> Summary:
    """The summary of two spans of which the later follows upon the earlier; of a state and a span, the state behind it.

    Associative, and differentiable. earlier, later: of the same recurrence and sequences, as `summary` returns them;
    earlier may be a state, a Summary without carry. Returns a Summary with a carry if earlier has one.
    Raises ValueError for a later one without carry and for shapes that do not fit.
    """
    if later.carry is None:
        raise ValueError("later: expected the summary of a span; got a state, which has no carry")
    if earlier.added.shape != later.added.shape:
        raise ValueError(f"later: expected added {list(earlier.added.shape)}; got {list(later.added.shape)}")
    if later.unit is not None:
        return _merge_stabilized(earlier, later)
    added = _through(later.carry, earlier.added) + later.added
    return Summary(added, None if earlier.carry is None else _composed(later.carry, earlier.carry, later.added.dim()))


def _through(carry: Tensor, state: Tensor) -> Tensor:
    if state.dim() == 2:
        return state * carry if carry.dim() == 2 else _turned(carry, state.unflatten(-1, (-1, 2))).flatten(-2)
    if carry.dim() == 4:
        return carry @ state
    return state * carry.reshape(*carry.shape, *(1,) * (4 - carry.dim()))


def _composed(later: Tensor, earlier: Tensor, dims: int) -> Tensor:
    if later.dim() == 4:
        return later @ earlier
    return _turned(later, earlier) if dims == 2 and later.dim() == 3 else later * earlier


def _turned(by: Tensor, x: Tensor) -> Tensor:
    """Product of complex numbers [..., 2]."""
    (a, b), (c, d) = by.unbind(-1), x.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def _merge_stabilized(earlier: Summary, later: Summary) -> Summary:
    reach = earlier.unit + later.carry
    unit = torch.maximum(reach, later.unit)
    # where neither wrote anything: minus infinity less itself is no number
    level = unit.masked_fill(unit == -torch.inf, 0.0)
    shares = ((x - level).exp()[..., None, None] for x in (reach, later.unit))
    added = next(shares) * earlier.added + next(shares) * later.added
    return Summary(added, None if earlier.carry is None else earlier.carry + later.carry, unit)
