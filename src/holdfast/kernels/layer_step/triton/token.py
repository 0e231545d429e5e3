"""A layer's token up to its state: a program takes a head of a sequence and a block of V's columns.

What all programs of a head read - the convolution's tail, a position, mLSTM's n and m - is updated by the launch that
follows, so that no program writes what another reads. PDL: that launch starts early, and waits for this one's end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid
from holdfast.kernels.lib.triton.sincos import reduced_cos_sin
from holdfast.kernels.lru.triton.gated_gelu import normal_cdf
from holdfast.kernels.lru.triton.gates import magnitude

from .pieces import ConvSource, Token, conv_silu, head_gates, load_silu, program_coords, state_step


@triton.jit
def conv_token(
    x, tail, state, weight, bias, a, beta, A_log, dt_bias, D, gate, o,
    H, state_row, state_head, key_step, x_row, tail_row, tail_step, tail_channel, a_row, beta_row, gate_row,
    largest, l2_eps, scale,
    PDL: tl.constexpr, DELTA: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """ConvStep up to its norm, with Mamba-2's gate: a program a head and BLOCK_V columns of V.

    x [B, channels], tail [B, L, channels], weight [channels, W], bias [channels] or None
    a, beta [B, H], A_log, dt_bias, D [H], gate [B, H V], or None
    state [B, H, K, V] float32, updated
    o [B, H, V] float32, written
    """
    if PDL:
        gdc_launch_dependents()
    row, head, split = program_coords(H, (V + BLOCK_V - 1) // BLOCK_V)
    rows, columns = tl.arange(0, BLOCK_K), split * BLOCK_V + tl.arange(0, BLOCK_V)
    x += row * x_row
    tail += row * tail_row
    keys = (head // GROUP) * K + rows
    values = head * V + columns
    if DELTA:
        q_at, k_at, v_at = keys, H // GROUP * K + keys, 2 * (H // GROUP) * K + values
    else:
        v_at, k_at, q_at = values, H * V + keys, H * V + H // GROUP * K + keys
    source = ConvSource(x=x, tail=tail, weight=weight, bias=bias)
    q = conv_silu(source, q_at, rows < K, tail_step, tail_channel, W, L)
    k = conv_silu(source, k_at, rows < K, tail_step, tail_channel, W, L)
    v = conv_silu(source, v_at, columns < V, tail_step, tail_channel, W, L)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    write = 0.0
    if a is not None:
        size = tl.load(a + row * a_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        write = -log_sigmoid(-size)
        decay *= tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * write)
    if DELTA:
        write = largest * sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32))
        q *= tl.rsqrt(tl.sum(q * q, 0) + l2_eps)
        k *= tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    state += row * state_row + head.to(tl.int64) * state_head
    token = Token(q=q, k=k, v=v, decay=decay, beta=write)
    found = scale * state_step(state, key_step, token, rows, columns, K, V, DELTA)
    if D is not None:
        found += tl.load(D + head).to(tl.float32) * v
    if not DELTA:
        found *= load_silu(gate + row * gate_row, values, columns < V)
    tl.store(o + row * H * V + values, found, mask=columns < V)


@triton.jit
def cos_sin(rotations):
    """Return cosine and sine of 2 pi rotations, in float64. The library's cosine keeps a stack for large angles."""
    quarters = tl.floor(4.0 * rotations + 0.5)
    rest = ((4.0 * rotations - quarters) * 1.5707963267948966).to(tl.float32)
    return reduced_cos_sin(rest, (quarters - 4.0 * tl.floor(0.25 * quarters)).to(tl.int32))


@triton.jit
def rotated(x, at, rows, cos, sin, K: tl.constexpr):
    """Return x [K] with its pairs (j, j + K / 2) rotated by an angle."""
    HALF: tl.constexpr = K // 2
    own = tl.load(x + at + rows, mask=rows < K, other=0.0).to(tl.float32)
    other = tl.load(x + at + tl.where(rows < HALF, rows + HALF, rows - HALF), mask=rows < K, other=0.0).to(tl.float32)
    return own * cos + tl.where(rows < HALF, -other, other) * sin


@triton.jit
def retention_token(
    x, state, a, position, o, H, state_row, state_head, key_step, x_row, a_row, normalizer, scale,
    PDL: tl.constexpr, LOG2_BASE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """RetentionStep up to its norm: a program a head and BLOCK_V columns of V.

    x [B, q, k and v of all heads], a [B, H K] or None, position [B] or None
    state [B, H, K, V] float32, updated
    o [B, H, V] float32, written
    """
    if PDL:
        gdc_launch_dependents()
    row, head, split = program_coords(H, (V + BLOCK_V - 1) // BLOCK_V)
    rows, columns = tl.arange(0, BLOCK_K), split * BLOCK_V + tl.arange(0, BLOCK_V)
    x += row * x_row
    keys, values = head * K, head * V + columns
    if position is None:
        q = tl.load(x + keys + rows, mask=rows < K, other=0.0).to(tl.float32)
        k = tl.load(x + H * K + keys + rows, mask=rows < K, other=0.0).to(tl.float32)
        opened = tl.load(a + row * a_row + keys + rows, mask=rows < K, other=0.0).to(tl.float32)
        decay = tl.exp(log_sigmoid(opened) / normalizer)
    else:
        pair = tl.where(rows < K // 2, rows, rows - K // 2).to(tl.float64)
        # base^(-pair / (K / 2)) / (2 pi) rotations a token; float64 holds the position exactly
        frequency = tl.exp2(pair * (-LOG2_BASE / (K // 2)) - 2.651496129472319)
        cos, sin = cos_sin(tl.load(position + row).to(tl.float64) * frequency)
        q = rotated(x, keys, rows, cos, sin, K)
        k = rotated(x, H * K + keys, rows, cos, sin, K)
        decay = tl.zeros([BLOCK_K], tl.float32) + (1.0 - tl.exp2(-5.0 - head.to(tl.float32)))
    v = tl.load(x + 2 * H * K + values, mask=columns < V, other=0.0).to(tl.float32)
    state += row * state_row + head.to(tl.int64) * state_head
    found = scale * state_step(state, key_step, Token(q=q, k=k, v=v, decay=decay, beta=1.0), rows, columns, K, V, False)
    tl.store(o + row * H * V + values, found, mask=columns < V)


@triton.jit
def mlstm_token(
    x, gates, C, m, o, H, state_row, state_head, key_step, m_row, x_row, gates_row, cap, scale,
    PDL: tl.constexpr, EXPONENTIAL: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """MLSTMStep up to its division: a program a head and BLOCK_V columns of V.

    x [B, q, k and v of all heads], gates [B, 2 H], m [B, H] float32
    C [B, H, K, V] float32, updated
    o [B, H, V] float32, written
    """
    if PDL:
        gdc_launch_dependents()
    row, head, split = program_coords(H, (V + BLOCK_V - 1) // BLOCK_V)
    rows, columns = tl.arange(0, BLOCK_K), split * BLOCK_V + tl.arange(0, BLOCK_V)
    x += row * x_row
    values = head * V + columns
    q = tl.load(x + head * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    k = tl.load(x + H * K + head * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    v = tl.load(x + 2 * H * K + values, mask=columns < V, other=0.0).to(tl.float32)
    stabilized = head_gates(gates + row * gates_row, m + row * m_row, head, H, cap, EXPONENTIAL)
    decay = tl.zeros([BLOCK_K], tl.float32) + tl.exp(stabilized.log_decay)
    C += row * state_row + head.to(tl.int64) * state_head
    token = Token(q=q, k=k, v=v, decay=decay, beta=stabilized.beta)
    found = scale * state_step(C, key_step, token, rows, columns, K, V, False)
    tl.store(o + row * H * V + values, found, mask=columns < V)


@triton.jit
def rglru_token(
    u, z, gates, h, rate, y, channels, h_row, u_row, z_row, gates_row, decay_scale,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All of RGLRUStep: a program takes BLOCK channels of a sequence.

    u, z [B, D], gates [B, D / HEAD, 2 HEAD], rate [D]
    h [B, D] float32, updated
    y [B, D], written
    """
    across = tl.cdiv(channels, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    at = gates + row * gates_row + (d // HEAD) * 2 * HEAD + d % HEAD
    r = tl.load(at, mask=here, other=0.0).to(tl.float32)
    i = tl.load(at + HEAD, mask=here, other=0.0).to(tl.float32)
    softplus = -log_sigmoid(-tl.load(rate + d, mask=here, other=0.0).to(tl.float32))
    found = magnitude(sigmoid(r), softplus, decay_scale)
    write = found.scale * sigmoid(i) * tl.load(u + row * u_row + d, mask=here, other=0.0).to(tl.float32)
    after = found.decay * tl.load(h + row * h_row + d, mask=here, other=0.0) + write
    tl.store(h + row * h_row + d, after, mask=here)
    x = tl.load(z + row * z_row + d, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * channels + d, (after * x * normal_cdf(x)).to(y.dtype.element_ty), mask=here)
