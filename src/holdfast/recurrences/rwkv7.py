"""RWKV-7: a vector decay, what another key reads of the state before it, and a write of its own."""

import torch
from torch import Tensor

from .definition import Argument, Finish, MatrixCall, Recurrence
from .example import Draw, Sizes
from .micro_steps import at_first, at_last, last_of
from .scalars import number
from .simple_gla import STATE

# the state's transition by a and b, then the write of v by k
STEPS = 2


def _map(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[MatrixCall, Finish]:
    call = MatrixCall(
        at_last(r, STEPS),
        torch.stack((b, k), 2).flatten(1, 2),
        at_last(v, STEPS),
        at_first(w, STEPS),
        initial_state=initial_state,
        # a delta rule takes away what is read
        e=at_first(-a, STEPS),
        scale=number("scale", scale),
        delta=True,
        erase_before_decay=True,
    )
    return call, lambda o, state: (last_of(o, STEPS), state)


def _example(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    B, T, H, K, Hq = sizes.B, sizes.T, sizes.H, sizes.K, sizes.query_heads
    removed = draw.unit(B, T, Hq, K)
    return {
        "r": draw.normal(B, T, Hq, K, scale=K**-0.5),
        "w": draw.log_decay(B, T, H, K),
        "k": draw.normal(B, T, Hq, K, scale=K**-0.5),
        "v": draw.normal(B, T, H, sizes.V),
        # as the layer has them: a key that is removed, and how much of it
        "a": -removed,
        "b": removed * draw.gate(B, T, Hq, K),
        "initial_state": draw.state(B, H, K, sizes.V),
    }


RWKV7 = Recurrence(
    name="rwkv7",
    family="matrix",
    title="RWKV-7",
    equation="S_t = diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T;  o_t = scale S_t^T r_t",
    paper="Peng et al. 2025, RWKV-7 Goose (arXiv:2503.14456)",
    arguments={
        "r": Argument("receptances, what other recurrences call queries", "B T Hq K"),
        "w": Argument("natural-log decay of each key channel, at most 0", "B T H K", "float"),
        "k": Argument("keys", "B T Hq K"),
        "v": Argument("values", "B T H V"),
        "a": Argument("keys by which the state is read before its decay", "B T Hq K"),
        "b": Argument("keys by which what was read is written", "B T Hq K"),
    }
    | STATE,
    map=_map,
    example=_example,
)
