"""What follows a layer's token: the norm over a head, the output gate, and the update of what all heads had read."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from holdfast.kernels.lib.triton.sigmoid import sigmoid

from .pieces import TailStrides, head_gates, load_silu


@triton.jit
def shift_tail(x, tail, channels, program, x_row, strides, L: tl.constexpr, BLOCK: tl.constexpr):
    """Drop the oldest input of BLOCK channels' tail and append x."""
    across = tl.cdiv(channels, BLOCK)
    row = (program // across).to(tl.int64)
    d = program % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    cells = tail + row * strides.row + d.to(tl.int64) * strides.channel
    for j in tl.static_range(1, L):
        tl.store(cells + (j - 1) * strides.step, tl.load(cells + j * strides.step, mask=here, other=0.0), mask=here)
    last = tl.load(x + row * x_row + d, mask=here, other=0.0).to(tail.dtype.element_ty)
    tl.store(cells + (L - 1) * strides.step, last, mask=here)


@triton.jit
def rms_finish(
    o, gate, weight, y, x, tail, position, rows, G, eps, gate_row, channels, x_row, tail_row, tail_step, tail_channel,
    PDL: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = rmsnorm(o) silu(gate): a program a row of N; the programs behind them shift the tail.

    o [B, G, N] float32; gate [B, G N] or None; weight [N] if SHARED, else [G, N]
    y [B, G, N], written
    x [B, channels], tail [B, L, channels]: the newest input takes the place of the oldest; position [B], counted on
    """
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    if program < rows:
        row, group = (program // G).to(tl.int64), program % G
        n = tl.arange(0, BLOCK_N)
        inside = n < N
        found = tl.load(o + (row * G + group) * N + n, mask=inside, other=0.0)
        found *= tl.rsqrt(tl.sum(found * found, 0) / N + eps)
        of = n if SHARED else group * N + n
        found *= tl.load(weight + of, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            found *= load_silu(gate + row * gate_row, group * N + n, inside)
        tl.store(y + (row * G + group) * N + n, found.to(y.dtype.element_ty), mask=inside)
        if position is not None and group == 0:
            tl.store(position + row, tl.load(position + row) + 1)
    elif L > 0:
        strides = TailStrides(row=tail_row, step=tail_step, channel=tail_channel)
        shift_tail(x, tail, channels, program - rows, x_row, strides, L, BLOCK)


@triton.jit
def mlstm_finish(
    o, x, gates, n, m, gate, weight, y, H, n_row, n_head, n_step, m_row, x_row, gates_row, gate_row,
    cap, scale, eps, norm_eps, PDL: tl.constexpr, EXPONENTIAL: tl.constexpr, NORMALIZE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """y = sigmoid(gate) layernorm(o / d): a program a head of a sequence. n and m are updated.

    Without NORMALIZE, d is 1 and neither changes: m belongs to gates that are exponential, which are normalised.

    o [B, H, V] float32; x [B, q, k and v of all heads]; gates [B, 2 H]; gate [B, H V]; weight [H, V]
    n [B, H, K], m [B, H] float32, updated
    y [B, H, V], written
    """
    if PDL:
        gdc_wait()
    row, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    rows, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    here = columns < V
    found = head_gates(gates + row * gates_row, m + row * m_row, head, H, cap, EXPONENTIAL)
    h = tl.load(o + (row * H + head) * V + columns, mask=here, other=0.0)
    if NORMALIZE:
        x += row * x_row + head * K
        n += row * n_row + head * n_head + rows * n_step
        q = tl.load(x + rows, mask=rows < K, other=0.0).to(tl.float32)
        k = tl.load(x + H * K + rows, mask=rows < K, other=0.0).to(tl.float32)
        norm = tl.exp(found.log_decay) * tl.load(n, mask=rows < K, other=0.0) + found.beta * k
        # several threads may hold a channel, and all have m: they have read both before one writes
        tl.debug_barrier()
        tl.store(n, norm, mask=rows < K)
        tl.store(m + row * m_row + head, found.m)
        h /= tl.maximum(tl.abs(scale * tl.sum(norm * q, 0)), found.floor) + eps
    h -= tl.sum(h, 0) / V
    h = tl.where(here, h, 0.0)
    h *= tl.rsqrt(tl.sum(h * h, 0) / V + norm_eps)
    h *= tl.load(weight + head * V + columns, mask=here, other=0.0).to(tl.float32)
    h *= sigmoid(tl.load(gate + row * gate_row + head * V + columns, mask=here, other=0.0).to(tl.float32))
    tl.store(y + (row * H + head) * V + columns, h.to(y.dtype.element_ty), mask=here)
