"""A chunk's log decays."""

import triton
import triton.language as tl

# exp of it is 0 in float32; sums of a chunk of them still resolve ordinary log decays
LOG_DECAY_FLOOR = tl.constexpr(-120.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log_decay_cumsum(g, at, live, REVERSE: tl.constexpr, WIDE: tl.constexpr):
    """Return log2 of the decay from the chunk's edge to each token, that of the whole chunk, and g as it is.

    Forward, the edge is the chunk's start and a token's own decay counts; in reverse, it is the end and does not.
    """
    g = tl.load(g + at, mask=live, other=0.0)
    x = tl.where(g <= LOG_DECAY_FLOOR, LOG_DECAY_FLOOR, g).to(tl.float64 if WIDE else tl.float32) * LOG2E
    total = tl.sum(x, 0)
    here = tl.cumsum(x, 0)
    if REVERSE:
        here = total - here
    return here, total, g


@triton.jit
def log_decay_cumsum_in_parts(g, at, live):
    """Return log_decay_cumsum's forward, here and what is missing of it, total and what is missing of it, in float32.

    Sums of multiples of 2^-9 are exact up to 64 tokens of LOG_DECAY_FLOOR, and the rest is at most 2^-3. In one part
    they err by 1e-5 where one of the log decays is -100.
    """
    g = tl.load(g + at, mask=live, other=0.0)
    x = tl.where(g <= LOG_DECAY_FLOOR, LOG_DECAY_FLOOR, g) * LOG2E
    high = tl.floor(x * 512) * (1.0 / 512)
    low = x - high
    return tl.cumsum(high, 0), tl.cumsum(low, 0), tl.sum(high, 0), tl.sum(low, 0)


@triton.jit
def log_decay_cumsum_or_zero(g, at, live, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """Return log_decay_cumsum in forward order; zeros where g is None."""
    if g is not None:
        here, total, own = log_decay_cumsum(g, at, live, False, WIDE)
    else:
        here = tl.zeros([CHUNK], tl.float32)
        total = tl.full([], 0.0, tl.float32)
        own = here
    return here, total, own
