"""gla_scan: gated linear attention, whose state is a key-by-value matrix a head."""

import mlx.core as mx

from . import chunked
from .chassis import DEFAULT_SEG, Arrays, Scan
from .check import check_arrays, check_state
from .kernel import Kernel
from .tile import Tile, join, part_of

HEADERS = ("tile", "checkpoint", "gla")
FORWARD = Kernel("gla_forward", ("q", "k", "v", "gates", "S0"), ("y", "last"), HEADERS)
BACKWARD = Kernel(
    "gla_backward",
    ("q", "k", "v", "gates", "S0", "dy", "dlast"),
    ("dq", "dk", "dv", "dgates", "dS0", "kept"),
    HEADERS,
)


def _step(q: mx.array, k: mx.array, v: mx.array, gates: mx.array, S: mx.array) -> tuple[mx.array, mx.array]:
    decay = gates[..., None, None] if gates.ndim == 2 else gates[..., None]
    S = decay * S + k[..., None] * v[..., None, :]
    return (q[..., None] * S).sum(-2), S


def gate_channels(gates: mx.array) -> int:
    """Gates a head and token: one, or [B, L, H, K]'s K."""
    return 1 if gates.ndim == 3 else gates.shape[3]


def _forward(inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
    _, _, v, gates = inputs
    B, _, H, V = v.shape
    tile = Tile.forward(state.shape[2], V)
    y, last = FORWARD(
        inputs=[*inputs, state],
        template={"Y": v.dtype, "GK": gate_channels(gates), "K": state.shape[2], "V": V} | tile.template,
        grid=tile.grid(H, B),
        threadgroup=tile.threadgroup,
        outputs=[(v.shape, v.dtype), (state.shape, mx.float32)],
    )
    return y, last


def _backward(
    inputs: Arrays, state: mx.array, y: mx.array, grad_y: mx.array, grad_final: mx.array, seg: int
) -> list[mx.array]:
    q, k, v, gates = inputs
    B, L, H, V = v.shape
    tile = Tile.backward(state.shape[2], V)
    parts = tile.parts(H, B)
    sums = [((parts, *x.shape), tile.sum_dtype(x.dtype)) for x in (q, k, gates)]
    dq, dk, dv, dgates, dS0, _ = BACKWARD(
        inputs=[*inputs, state, grad_y, grad_final],
        template={"DQ": sums[0][1], "DK": sums[1][1], "DV": v.dtype, "DG": sums[2][1]}
        | {"GK": gate_channels(gates), "K": state.shape[2], "V": V, "SEG": seg, "SUB": part_of(seg)}
        | tile.template,
        grid=tile.grid(H, B, parts),
        threadgroup=tile.threadgroup,
        outputs=[
            sums[0],
            sums[1],
            (v.shape, v.dtype),
            sums[2],
            (state.shape, mx.float32),
            (tile.kept_shape(B, L, H, seg), mx.float32),
        ],
    )
    return [join(dq), join(dk), dv, join(dgates), dS0]


SCAN = Scan("gla_scan", _step, _forward, _backward, value=2, chunked=chunked.gla)


def _check(q: mx.array, k: mx.array, v: mx.array, gates: mx.array, time: str = "B L H") -> tuple[int, ...]:
    """The shape of the state."""
    is_one_a_head = isinstance(gates, mx.array) and gates.ndim == len(time.split())
    sizes = check_arrays(
        {
            "q": (q, f"{time} K"),
            "k": (k, f"{time} K"),
            "v": (v, f"{time} V"),
            "gates": (gates, time if is_one_a_head else f"{time} K"),
        }
    )
    return sizes["B"], sizes["H"], sizes["K"], sizes["V"]


def gla_scan_with_state(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Gated linear attention: S_t = diag(gate_t) S_{t-1} + k_t v_t^T, y_t = S_t^T q_t.

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635).

    Args:
        q, k: queries, already scaled, and keys [B, L, H, K]. float32, bfloat16 or float16, as all inputs.
        v: values [B, L, H, V], whose dtype is the output's.
        gates: [B, L, H], or [B, L, H, K] for one gate a key channel; the factor itself, not its logarithm, and any real
            number, negative and zero too.
        seg: tokens between the states that the backward pass keeps; any L.
        initial_state: float32 [B, H, K, V]; zeros by default.
        backend: "metal", "cuda" or "mlx"; by default the kernels where they run, else plain mlx.

    Returns:
        y [B, L, H, V] in v's dtype, and the final state, float32 [B, H, K, V]. Gradients, in the dtypes of what they
        belong to, flow through both to every input and initial_state.

    Raises:
        TypeError, ValueError: for an argument of the wrong type, dtype or shape, or a backend that cannot run, named in
            the message.
    """
    state = check_state(initial_state, _check(q, k, v, gates))
    return SCAN.run([q, k, v, gates], state, v.shape, seg, backend)


def gla_scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `gla_scan_with_state`, [B, L, H, V]."""
    return gla_scan_with_state(q, k, v, gates, seg, initial_state, backend)[0]


def gla_scan_reference(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, initial_state: mx.array | None = None
) -> mx.array:
    """The output of `gla_scan`, token by token in plain mlx, differentiated by mlx itself."""
    return SCAN.reference([q, k, v, gates], check_state(initial_state, _check(q, k, v, gates)), v.shape)


def gla_step(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One token of `gla_scan`, for decoding: inputs without L, state [B, H, K, V] -> (y [B, H, V], the next state)."""
    return SCAN.one([q, k, v, gates], check_state(state, _check(q, k, v, gates, "B H"), "state"))
