"""What the kernels of a step have in common: where a program is, the convolution, a head's state, the norm's sum."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid


@triton.jit
def place_of(H, SPLITS: tl.constexpr):
    """(sequence, head, block of V's columns) of this program."""
    program = tl.program_id(0)
    return (program // SPLITS // H).to(tl.int64), program // SPLITS % H, program % SPLITS


@triton.jit
def convolved(x, tail, weight, bias, d, here, tail_step, tail_channel, W: tl.constexpr, L: tl.constexpr):
    """silu(conv(x)) of channels d of one sequence, whose x and tail begin at these addresses."""
    z = tl.load(x + d, mask=here, other=0.0).to(tl.float32)
    z *= tl.load(weight + d * W + W - 1, mask=here, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + d, mask=here, other=0.0).to(tl.float32)
    before = tail + d.to(tl.int64) * tail_channel
    for j in tl.static_range(W - 1):
        held = tl.load(before + (L - W + 1 + j) * tail_step, mask=here, other=0.0).to(tl.float32)
        z += held * tl.load(weight + d * W + j, mask=here, other=0.0).to(tl.float32)
    return z * sigmoid(z)


@triton.jit
def advanced(state, key_step, q, k, v, decay, strength, rows, columns, K: tl.constexpr, V: tl.constexpr,
             DELTA: tl.constexpr):  # fmt: skip
    """o of a block of V's columns; state, the head's [K, V], is updated there. q, k, decay: [BLOCK_K]."""
    cells = state + rows[:, None].to(tl.int64) * key_step + columns[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    S = tl.load(cells, mask=inside, other=0.0) * decay[:, None]
    if DELTA:
        v -= tl.sum(S * k[:, None], 0)
    S += (strength * k)[:, None] * v[None, :]
    o = tl.sum(S * q[:, None], 0)
    # of a tile of fewer cells than threads several hold a cell: all have read it before one writes it
    tl.debug_barrier()
    tl.store(cells, S, mask=inside)
    return o


@triton.jit
def silu_at(gate, at, inside):
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    return z * sigmoid(z)


@triton.jit
def stabilized(gates, m, head, H, cap, EXPONENTIAL: tl.constexpr):
    """(decay, write strength, the least divisor, m afterwards) of an mLSTM's head. gates, m: of the sequence."""
    i = capped(tl.load(gates + head).to(tl.float32), cap)
    log_f = log_sigmoid(capped(tl.load(gates + H + head).to(tl.float32), cap))
    before = tl.load(m + head)
    if EXPONENTIAL:
        after = tl.maximum(log_f + before, i)
        # float64: differences of numbers that may be large beside them
        drop = (log_f.to(tl.float64) + before - after).to(tl.float32)
        # past this exponential the quotient is 0 to rounding
        return tl.exp(drop), tl.exp(i - after), tl.exp(tl.minimum(-after, 87.7)), after
    return tl.exp(log_f), sigmoid(i), 1.0, before


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap); x where cap is 0."""
    safe = tl.where(cap > 0, cap, 1.0)
    small = tl.exp(-2.0 * tl.abs(x) / safe)
    bent = safe * (1.0 - small) / (1.0 + small)
    return tl.where(cap > 0, tl.where(x < 0, -bent, bent), x)
