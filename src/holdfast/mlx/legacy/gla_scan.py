"""Gated linear attention with one gate a head, every state kept."""

import mlx.core as mx

from ..chassis import Arrays
from ..check import check_arrays, check_count
from ..gla import SCAN
from ..kernel import SIMD_WIDTH, Kernel
from ..tile import Tile
from ..tile import join as join_parts
from .chunks import cut, join
from .history import require_kernels, run

# Tokens that the backward pass takes at a time; the states are all there.
SEG = 32
FORWARD = Kernel("gla_history_forward", ("q", "k", "v", "gates"), ("y", "kept"), ("tile", "gla"))
BACKWARD = Kernel(
    "gla_history_backward",
    ("q", "k", "v", "gates", "S0", "dy", "dlast", "kept"),
    ("dq", "dk", "dv", "dgates", "dS0"),
    ("tile", "history", "gla"),
    body="gla_backward",
)


def _forward(inputs: Arrays) -> tuple[mx.array, mx.array]:
    q, _, v, _ = inputs
    B, L, H, V = v.shape
    tile = Tile.backward(q.shape[3], V)
    slots = -(-L // SEG) * SEG + 1
    kept = (B * H * tile.blocks * tile.SG, slots, SIMD_WIDTH * tile.RPL * tile.CPL)
    y, states = FORWARD(
        inputs=inputs,
        template={"Y": v.dtype, "GK": 1, "K": q.shape[3], "V": V, "SEG": SEG} | tile.template,
        grid=tile.grid(H, B),
        threadgroup=tile.threadgroup,
        outputs=[(v.shape, v.dtype), (kept, mx.float32)],
    )
    return y, states


def _backward(inputs: Arrays, kept: mx.array, grad_y: mx.array) -> list[mx.array]:
    q, k, v, gates = inputs
    B, _, H, V = v.shape
    K = q.shape[3]
    tile = Tile.backward(K, V)
    zeros = mx.zeros((B, H, K, V), mx.float32)
    parts = [((tile.blocks, *x.shape), tile.sum_dtype(x.dtype)) for x in (q, k, gates)]
    dq, dk, dv, dgates, _ = BACKWARD(
        inputs=[*inputs, zeros, grad_y, zeros, kept],
        template={"DQ": parts[0][1], "DK": parts[1][1], "DV": v.dtype, "DG": parts[2][1]}
        | {"GK": 1, "K": K, "V": V, "SEG": SEG, "SUB": SEG}
        | tile.template,
        grid=tile.grid(H, B),
        threadgroup=tile.threadgroup,
        outputs=[parts[0], parts[1], (v.shape, v.dtype), parts[2], (zeros.shape, mx.float32)],
    )
    return [join_parts(dq), join_parts(dk), dv, join_parts(dgates)]


def _check(q: mx.array, k: mx.array, v: mx.array, gates: mx.array) -> dict[str, int]:
    return check_arrays({"q": (q, "B L H K"), "k": (k, "B L H K"), "v": (v, "B L H V"), "gates": (gates, "B L H")})


def gla_scan_metal(q: mx.array, k: mx.array, v: mx.array, gates: mx.array) -> mx.array:
    """S_t = gate_t S_{t-1} + k_t v_t^T, y_t = S_t^T q_t, with every state kept for the backward pass.

    q, k [B, L, H, K], v [B, L, H, V], gates [B, L, H], any real numbers -> y [B, L, H, V] in v's dtype. `gla_scan` does
    the same with less memory. Raises TypeError or ValueError for an argument of the wrong type, dtype or shape.
    """
    sizes = _check(q, k, v, gates)
    zeros = mx.zeros(tuple(sizes[a] for a in "BHKV"), mx.float32)
    return run(SCAN, _forward, _backward, [q, k, v, gates], zeros)


def gla_scan_chunked(q: mx.array, k: mx.array, v: mx.array, gates: mx.array, chunk_size: int = 32) -> mx.array:
    """`gla_scan_metal` by matrix products over chunks of tokens, in plain mlx, differentiated by mlx itself.

    Decays inside a chunk are products of its gates, not differences of logarithms: any real gate is right.
    """
    sizes = _check(q, k, v, gates)
    check_count("chunk_size", chunk_size)
    if 0 in v.shape:
        return mx.zeros(v.shape, v.dtype)
    # [B, H, chunks, C, ...]; tokens past the end decay nothing and write nothing
    q_, k_, v_ = (cut(x.astype(mx.float32), chunk_size, 0.0).moveaxis(3, 1) for x in (q, k, v))
    g = cut(gates.astype(mx.float32), chunk_size, 1.0).moveaxis(3, 1)
    token = mx.arange(chunk_size)
    # column s holds the gates after s: their running product is the decay from s to t
    after = mx.where(token[:, None] > token, g[..., None], 1.0)
    decay = mx.where(token[:, None] >= token, mx.cumprod(after, axis=-2), 0.0)
    inside = ((q_ @ k_.swapaxes(-1, -2)) * decay) @ v_
    writes = (k_ * decay[..., -1, :, None]).swapaxes(-1, -2) @ v_
    from_start = mx.cumprod(g, axis=-1)
    S, outs = mx.zeros(tuple(sizes[a] for a in "BHKV")), []
    for n in range(g.shape[2]):
        outs.append(inside[:, :, n] + (q_[:, :, n] * from_start[:, :, n, :, None]) @ S)
        S = from_start[:, :, n, -1, None, None] * S + writes[:, :, n]
    return join(mx.stack(outs, 2).moveaxis(1, 3), v.shape[1]).astype(v.dtype)


def _gla_forward_kernel(q: mx.array, k: mx.array, v: mx.array, gates: mx.array) -> tuple[mx.array, mx.array]:
    """`gla_scan_metal` without its gradient: y, and every state as `_gla_backward_metal` takes them. Kernels alone."""
    _check(q, k, v, gates)
    require_kernels()
    return _forward([q, k, v, gates])


def _gla_backward_metal(
    grad_out: mx.array, h_all: mx.array, q: mx.array, k: mx.array, v: mx.array, gates: mx.array
) -> tuple[mx.array, ...]:
    """Gradients of q, k, v and gates, from y's and what `_gla_forward_kernel` kept."""
    _check(q, k, v, gates)
    require_kernels()
    return tuple(_backward([q, k, v, gates], h_all, grad_out))


def _gla_backward_chunked(
    grad_out: mx.array, h_all: mx.array, q: mx.array, k: mx.array, v: mx.array, gates: mx.array
) -> tuple[mx.array, ...]:
    """`_gla_backward_metal` in plain mlx: the gradient of `gla_scan_chunked`, which finds the states again."""
    return tuple(mx.vjp(gla_scan_chunked, [q, k, v, gates], [grad_out.astype(v.dtype)])[1])
