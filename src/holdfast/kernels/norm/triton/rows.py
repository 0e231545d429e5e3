"""RMS and layer normalisation with an output gate: a program takes rows of heads' outputs, read once."""

import triton
import triton.language as tl


@triton.jit
def activated(gate, SIGMOID: tl.constexpr):
    """Return the activation of a gate and its derivative."""
    open_ = 1.0 / (1.0 + tl.exp(-gate))
    if SIGMOID:
        return open_, open_ * (1.0 - open_)
    return gate * open_, open_ * (1.0 + gate * (1.0 - open_))


@triton.jit
def row_offsets(rows, head, T, H, x_batch, x_step, x_head, HEADS: tl.constexpr):
    """Return where rows of a tensor [B, T, H, D] start. HEADS 1: rows are of all heads; else of the given one."""
    if HEADS == 1:
        head = rows % H
        token = rows // H
    else:
        token = rows
    return (token // T) * x_batch + (token % T) * x_step + head * x_head


@triton.jit
def dense_row_offsets(rows, head, H, D: tl.constexpr, HEADS: tl.constexpr):
    """Do the same for a contiguous tensor, which may have more than 2^31 elements."""
    if HEADS == 1:
        return rows * D
    return (rows * H + head) * D


@triton.jit
def centered(o, inside, D: tl.constexpr):
    """Subtract the rows' mean; 0 outside."""
    return tl.where(inside, o - (tl.sum(o, 1) / D)[:, None], 0.0)


@triton.jit
def norm_fwd(
    o_ptr, gate_ptr, weight_ptr, y_ptr, count, T, H, eps,
    o_batch, o_step, o_head, gate_batch, gate_step, gate_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SIGMOID: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows * HEADS,).

    o, gate [B, T, H, D], strides; gate may be None
    weight [HEADS, D] or None
    y [B, T, H, D], contiguous, written
    count: rows of a head, or of all heads where they share weight (HEADS 1)
    """
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rows = (tl.program_id(0) // HEADS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    at = row_offsets(rows, head, T, H, o_batch, o_step, o_head, HEADS)
    o = tl.load(o_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        o = centered(o, inside, D)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        at = row_offsets(rows, head, T, H, gate_batch, gate_step, gate_head, HEADS)
        gate = tl.load(gate_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        y *= activated(gate, SIGMOID)[0]
    at = dense_row_offsets(rows, head, H, D, HEADS)
    tl.store(y_ptr + at[:, None] + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_bwd(
    o_ptr, gate_ptr, weight_ptr, dy_ptr, do_ptr, dgate_ptr, parts_ptr, count, tiles, T, H, eps,
    o_batch, o_step, o_head, gate_batch, gate_step, gate_head, dy_batch, dy_step, dy_head,
    dgate_batch, dgate_step, dgate_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SIGMOID: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    """Grid (parts * HEADS,). Program p takes tiles p, p + stride and so on: sums in the same order in every run.

    o, gate, dy [B, T, H, D], strides; gate may be None; weight [HEADS, D] or None
    do [B, T, H, D], contiguous, dgate [B, T, H, D], by strides, or None, written
    parts [p, HEADS, D] float32 or None, written: sums over a program's rows, for weight
    """
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    part = tl.program_id(0) // HEADS
    stride = tl.num_programs(0) // HEADS
    columns = tl.arange(0, BLOCK_D)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)
        sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in tl.range(part, tiles, stride):
        rows = tl.arange(0, ROWS) + (tl.zeros([], tl.int64) + tile) * ROWS
        inside = (rows < count)[:, None] & (columns < D)[None, :]
        at = row_offsets(rows, head, T, H, o_batch, o_step, o_head, HEADS)
        o = tl.load(o_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        at = row_offsets(rows, head, T, H, dy_batch, dy_step, dy_head, HEADS)
        dy = tl.load(dy_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            o = centered(o, inside, D)
        out = dense_row_offsets(rows, head, H, D, HEADS)[:, None] + columns[None, :]
        # eps may be 0, and rows beyond the last are: they count in the sums
        inverse = tl.rsqrt(tl.sum(o * o, 1) / D + tl.where(rows < count, eps, 1.0))
        normal = o * inverse[:, None]
        if gate_ptr is not None:
            at = row_offsets(rows, head, T, H, gate_batch, gate_step, gate_head, HEADS)
            gate = tl.load(gate_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            value, derivative = activated(gate, SIGMOID)
            dgate = dy * normal * derivative
            if weight_ptr is not None:
                dgate *= weight[None, :]
            at = row_offsets(rows, head, T, H, dgate_batch, dgate_step, dgate_head, HEADS)
            tl.store(dgate_ptr + at[:, None] + columns[None, :], dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dy *= value
        if weight_ptr is not None:
            sums += dy * normal
            dy *= weight[None, :]
        if CENTER:
            dy = centered(dy, inside, D)
        do = inverse[:, None] * (dy - normal * (tl.sum(dy * normal, 1) / D)[:, None])
        tl.store(do_ptr + out, do.to(do_ptr.dtype.element_ty), mask=inside)
    if weight_ptr is not None:
        tl.store(parts_ptr + (part * HEADS + head) * D + columns, tl.sum(sums, 0), mask=columns < D)
