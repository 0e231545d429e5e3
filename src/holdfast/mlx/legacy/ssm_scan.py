"""The selective scan of Mamba, with a state a channel, every state kept."""

import mlx.core as mx

from ..chassis import Arrays, Scan
from ..check import check_arrays, check_count
from ..kernel import Kernel
from ..tile import Tile
from ..tile import join as join_parts
from .chunks import cut, join
from .history import require_kernels, run

FORWARD = Kernel("selective_forward", ("u", "delta", "B", "C", "A"), ("y", "states"), ("tile",))
BACKWARD = Kernel(
    "selective_backward", ("u", "delta", "B", "C", "A", "states", "dy"), ("du", "ddelta", "dB", "dC", "dA"), ("tile",)
)


def _step(
    u: mx.array, delta: mx.array, B: mx.array, C: mx.array, A: mx.array, S: mx.array
) -> tuple[mx.array, mx.array]:
    S = mx.exp(delta[..., None] * A) * S + (delta * u)[..., None] * B[:, None]
    return (S * C[:, None]).sum(-1), S


def _forward(inputs: Arrays) -> tuple[mx.array, mx.array]:
    u, A = inputs[0], inputs[4]
    tile = Tile.backward(A.shape[1], u.shape[2])
    y, states = FORWARD(
        inputs=inputs,
        template={"Y": u.dtype, "D": u.shape[2], "N": A.shape[1]} | tile.template,
        grid=tile.grid(1, u.shape[0]),
        threadgroup=tile.threadgroup,
        outputs=[(u.shape, u.dtype), ((*u.shape, A.shape[1]), mx.float32)],
    )
    return y, states


def _backward(inputs: Arrays, kept: mx.array, grad_y: mx.array) -> list[mx.array]:
    u, delta, B, C, A = inputs
    tile = Tile.backward(A.shape[1], u.shape[2])
    parts = [((tile.blocks, *x.shape), tile.sum_dtype(x.dtype)) for x in (B, C)]
    du, ddelta, dB, dC, dA = BACKWARD(
        inputs=[*inputs, kept, grad_y],
        template={"DU": u.dtype, "DD": delta.dtype, "DB": parts[0][1], "DC": parts[1][1]}
        | {"D": u.shape[2], "N": A.shape[1]}
        | tile.template,
        grid=tile.grid(1, u.shape[0]),
        threadgroup=tile.threadgroup,
        outputs=[(u.shape, u.dtype), (delta.shape, delta.dtype), *parts, ((u.shape[0], *A.shape), mx.float32)],
    )
    return [du, ddelta, join_parts(dB), join_parts(dC), dA.sum(0)]


SCAN = Scan("selective_scan_metal", _step, _forward, _backward, value=0, constants=1)


def _check(u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array) -> dict[str, int]:
    axes = {"u": (u, "B L D"), "delta": (delta, "B L D"), "B_in": (B_in, "B L N"), "C_in": (C_in, "B L N")}
    return check_arrays(axes | {"A_neg": (A_neg, "D N")})


def selective_scan_metal(u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array) -> mx.array:
    """S_t = exp(delta_t A) S_{t-1} + delta_t u_t B_t^T, y_t = S_t C_t, with every state kept for the backward pass.

    Source: Gu, Dao 2023, Mamba (arXiv:2312.00752), algorithm 2.

    u, delta [B, L, D], B_in, C_in [B, L, N], A_neg [D, N], negative -> y [B, L, D] in u's dtype. Raises TypeError or
    ValueError for an argument of the wrong type, dtype or shape.
    """
    sizes = _check(u, delta, B_in, C_in, A_neg)
    zeros = mx.zeros(tuple(sizes[a] for a in "BDN"), mx.float32)
    return run(SCAN, _forward, _backward, [u, delta, B_in, C_in, A_neg], zeros)


def selective_scan_chunked(
    u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array, chunk_size: int = 32
) -> mx.array:
    """`selective_scan_metal` with all chunks of tokens side by side, in plain mlx, differentiated by mlx itself.

    Inside a chunk, states are combined over 1, 2, 4, ... tokens with products of decays, never their quotients.
    """
    _check(u, delta, B_in, C_in, A_neg)
    check_count("chunk_size", chunk_size)
    if 0 in u.shape:
        return mx.zeros(u.shape, u.dtype)
    u_, delta_, B, C, A = (x.astype(mx.float32) for x in (u, delta, B_in, C_in, A_neg))
    decay = cut(mx.exp(delta_[..., None] * A), chunk_size, 1.0)
    state = cut((delta_ * u_)[..., None] * B[:, :, None], chunk_size, 0.0)
    reach = 1
    while reach < chunk_size:
        state = mx.concatenate(
            [state[:, :, :reach], state[:, :, reach:] + decay[:, :, reach:] * state[:, :, :-reach]], 2
        )
        decay = mx.concatenate([decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]], 2)
        reach *= 2
    entering, states = mx.zeros_like(state[:, 0, 0]), []
    for n in range(state.shape[1]):
        states.append(state[:, n] + decay[:, n] * entering[:, None])
        entering = states[-1][:, -1]
    y = (join(mx.stack(states, 1), u.shape[1]) * C[:, :, None]).sum(-1)
    return y.astype(u.dtype)


def _ssm_forward_kernel(
    u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array
) -> tuple[mx.array, mx.array]:
    """`selective_scan_metal` without its gradient: y, and every state, float32 [B, L, D, N]. Kernels alone."""
    _check(u, delta, B_in, C_in, A_neg)
    require_kernels()
    return _forward([u, delta, B_in, C_in, A_neg])


def _ssm_backward_metal(
    grad_y: mx.array, h_all: mx.array, u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array
) -> tuple[mx.array, ...]:
    """Gradients of u, delta, B_in, C_in and A_neg, from y's and every state."""
    _check(u, delta, B_in, C_in, A_neg)
    require_kernels()
    return tuple(_backward([u, delta, B_in, C_in, A_neg], h_all, grad_y))


def _ssm_backward_chunked(
    grad_y: mx.array, h_all: mx.array, u: mx.array, delta: mx.array, B_in: mx.array, C_in: mx.array, A_neg: mx.array
) -> tuple[mx.array, ...]:
    """`_ssm_backward_metal` in plain mlx: the gradient of `selective_scan_chunked`, which finds the states again."""
    return tuple(mx.vjp(selective_scan_chunked, [u, delta, B_in, C_in, A_neg], [grad_y.astype(u.dtype)])[1])
