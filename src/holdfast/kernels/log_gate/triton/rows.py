"""Device code of a gate's log decay and its gradient: a program takes BLOCK numbers that lie side by side."""

import triton
import triton.language as tl

from holdfast.kernels.matrix.triton_sigmoid import log_sigmoid, sigmoid


@triton.jit
def log_gate_forward(x, g, count, share, BLOCK: tl.constexpr):
    """g = share log(sigmoid(x)) in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(g + at, share * log_sigmoid(value), mask=at < count)


@triton.jit
def log_gate_backward(x, dg, dx, count, share, BLOCK: tl.constexpr):
    """dx of g's gradient dg."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    gradient = share * tl.load(dg + at, mask=at < count, other=0.0).to(tl.float32) * sigmoid(-value)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=at < count)
