"""ssd_scan: the selective state space scan of Mamba-2, whose state is a channel-by-state matrix a head."""

import mlx.core as mx

from . import chunked
from .chassis import DEFAULT_SEG, Arrays, Scan
from .check import check_arrays, check_divides, check_state
from .kernel import Kernel
from .tile import Tile, join, part_of

HEADERS = ("tile", "checkpoint", "ssd")
FORWARD = Kernel("ssd_forward", ("u", "delta", "B", "C", "A", "S0"), ("y", "last"), HEADERS)
BACKWARD = Kernel(
    "ssd_backward",
    ("u", "delta", "B", "C", "A", "S0", "dy", "dlast"),
    ("du", "ddelta", "dB", "dC", "dA", "dS0", "kept"),
    HEADERS,
)


def _step(
    u: mx.array, delta: mx.array, B: mx.array, C: mx.array, A: mx.array, S: mx.array
) -> tuple[mx.array, mx.array]:
    heads_a_group = u.shape[1] // B.shape[1]
    B, C = (mx.repeat(x, heads_a_group, axis=1) for x in (B, C))
    step = delta[..., None, None]
    S = mx.exp(step * A[:, None, :]) * S + (delta[..., None] * u)[..., None] * B[..., None, :]
    return (S * C[..., None, :]).sum(-1), S


def _forward(inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
    u = inputs[0]
    B, _, H, P = u.shape
    tile = Tile.forward(state.shape[3], P)
    y, last = FORWARD(
        inputs=[*inputs, state],
        template={"Y": u.dtype, "N": state.shape[3], "P": P} | tile.template,
        grid=tile.grid(H, B),
        threadgroup=tile.threadgroup,
        outputs=[(u.shape, u.dtype), (state.shape, mx.float32)],
    )
    return y, last


def _backward(
    inputs: Arrays, state: mx.array, y: mx.array, grad_y: mx.array, grad_final: mx.array, seg: int
) -> list[mx.array]:
    u, delta, B_in, C_in, _ = inputs
    B, L, H, P = u.shape
    G, N = B_in.shape[2:]
    tile = Tile.backward(N, P)
    parts = tile.parts(H, B)
    # a sum over the heads of a group is still to come where G < H
    each_head = [((parts, B, L, H, N), tile.sum_dtype(x.dtype) if G == H else mx.float32) for x in (B_in, C_in)]
    steps = ((parts, *delta.shape), tile.sum_dtype(delta.dtype))
    du, ddelta, dB, dC, dA, dS0, _ = BACKWARD(
        inputs=[*inputs, state, grad_y, grad_final],
        template={"DU": u.dtype, "DD": steps[1], "DB": each_head[0][1], "DC": each_head[1][1]}
        | {"N": N, "P": P, "SEG": seg, "SUB": part_of(seg)}
        | tile.template,
        grid=tile.grid(H, B, parts),
        threadgroup=tile.threadgroup,
        outputs=[
            (u.shape, u.dtype),
            steps,
            *each_head,
            ((parts, B, H, N), mx.float32),
            (state.shape, mx.float32),
            (tile.kept_shape(B, L, H, seg), mx.float32),
        ],
    )
    dB, dC = (_over_groups(join(x), G) for x in (dB, dC))
    return [du, join(ddelta), dB, dC, dA.sum((0, 1)), dS0]


def _over_groups(grad: mx.array, groups: int) -> mx.array:
    """Sums [B, L, H, N] over the heads of each group."""
    B, L, H, N = grad.shape
    return grad if groups == H else grad.reshape(B, L, groups, H // groups, N).sum(3)


SCAN = Scan("ssd_scan", _step, _forward, _backward, value=0, constants=1, chunked=chunked.ssd)


def _check(
    u: mx.array, delta: mx.array, B: mx.array, C: mx.array, A_neg: mx.array, time: str = "B L"
) -> tuple[int, ...]:
    """The shape of the state."""
    sizes = check_arrays(
        {
            "u": (u, f"{time} H P"),
            "delta": (delta, f"{time} H"),
            "B": (B, f"{time} G N"),
            "C": (C, f"{time} G N"),
            "A_neg": (A_neg, "H N"),
        }
    )
    check_divides("B", sizes["G"], "the number of heads", sizes["H"])
    return sizes["B"], sizes["H"], sizes["P"], sizes["N"]


def ssd_scan_with_state(
    u: mx.array,
    delta: mx.array,
    B: mx.array,
    C: mx.array,
    A_neg: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Selective state space scan of Mamba-2: S_t = exp(delta_t A) S_{t-1} + delta_t u_t B_t^T, y_t = S_t C_t.

    Source: Dao, Gu 2024, Transformers are SSMs (arXiv:2405.21060).

    Args:
        u: inputs [B, L, H, P], whose dtype is the output's. float32, bfloat16 or float16, as all inputs.
        delta: step sizes [B, L, H].
        B, C: projections into and out of the state [B, L, G, N]; G divides H, and group g serves the heads
            g H / G .. (g + 1) H / G - 1.
        A_neg: rates of decay [H, N], negative.
        seg: tokens between the states that the backward pass keeps; any L.
        initial_state: float32 [B, H, P, N]; zeros by default.
        backend: "metal", "cuda" or "mlx"; by default the kernels where they run, else plain mlx.

    Returns:
        y [B, L, H, P] in u's dtype, and the final state, float32 [B, H, P, N]. Gradients, in the dtypes of what they
        belong to, flow through both to every input and initial_state.

    Raises:
        TypeError, ValueError: for an argument of the wrong type, dtype or shape, or a backend that cannot run, named in
            the message.
    """
    state = check_state(initial_state, _check(u, delta, B, C, A_neg))
    return SCAN.run([u, delta, B, C, A_neg], state, u.shape, seg, backend)


def ssd_scan(
    u: mx.array,
    delta: mx.array,
    B: mx.array,
    C: mx.array,
    A_neg: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `ssd_scan_with_state`, [B, L, H, P]."""
    return ssd_scan_with_state(u, delta, B, C, A_neg, seg, initial_state, backend)[0]


def ssd_scan_reference(
    u: mx.array, delta: mx.array, B: mx.array, C: mx.array, A_neg: mx.array, initial_state: mx.array | None = None
) -> mx.array:
    """The output of `ssd_scan`, token by token in plain mlx, differentiated by mlx itself."""
    return SCAN.reference([u, delta, B, C, A_neg], check_state(initial_state, _check(u, delta, B, C, A_neg)), u.shape)


def ssd_step(
    u: mx.array, delta: mx.array, B: mx.array, C: mx.array, A_neg: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One token of `ssd_scan`, for decoding: inputs without L, state [B, H, P, N] -> (y [B, H, P], the next state)."""
    state = check_state(state, _check(u, delta, B, C, A_neg, "B"), "state")
    return SCAN.one([u, delta, B, C, A_neg], state)
