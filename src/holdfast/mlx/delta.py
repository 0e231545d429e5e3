"""gated_delta_scan and kda_scan: linear attention that corrects what its state has for a key.

The first has one gate a head, the second one a key channel; the kernels are the same.
"""

import mlx.core as mx

from . import chunked
from .chassis import DEFAULT_SEG, Arrays, Scan
from .check import check_arrays, check_divides, check_state
from .gla import gate_channels
from .kernel import Kernel
from .tile import Tile, join, part_of

HEADERS = ("tile", "gla", "delta", "checkpoint")
FORWARD = Kernel("delta_forward", ("q", "k", "v", "gates", "beta", "S0"), ("y", "last"), HEADERS)
BACKWARD = Kernel(
    "delta_backward",
    ("q", "k", "v", "gates", "beta", "S0", "dy", "dlast"),
    ("dq", "dk", "dv", "dgates", "dbeta", "dS0", "kept"),
    HEADERS,
)


def _step(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, S: mx.array
) -> tuple[mx.array, mx.array]:
    S = (gates[..., None, None] if gates.ndim == 2 else gates[..., None]) * S
    missing = v - (k[..., None] * S).sum(-2)
    S = S + k[..., None] * (beta[..., None] * missing)[..., None, :]
    return (q[..., None] * S).sum(-2), S


def _forward(inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
    _, _, v, gates, _ = inputs
    B, _, H, V = v.shape
    # sums over rows are in the state: another tile would round it otherwise than the backward pass does
    tile = Tile.backward(state.shape[2], V).apart(V)
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
    q, k, v, gates, beta = inputs
    B, L, H, V = v.shape
    tile = Tile.backward(state.shape[2], V)
    parts = tile.parts(H, B)
    sums = [((parts, *x.shape), tile.sum_dtype(x.dtype)) for x in (q, k, gates, beta)]
    dq, dk, dv, dgates, dbeta, dS0, _ = BACKWARD(
        inputs=[*inputs, state, grad_y, grad_final],
        template={"DQ": sums[0][1], "DK": sums[1][1], "DV": v.dtype, "DG": sums[2][1], "DBETA": sums[3][1]}
        | {"GK": gate_channels(gates), "K": state.shape[2], "V": V, "SEG": seg, "SUB": part_of(seg)}
        | tile.template,
        grid=tile.grid(H, B, parts),
        threadgroup=tile.threadgroup,
        outputs=[
            sums[0],
            sums[1],
            (v.shape, v.dtype),
            sums[2],
            sums[3],
            (state.shape, mx.float32),
            (tile.kept_shape(B, L, H, seg), mx.float32),
        ],
    )
    return [join(dq), join(dk), dv, join(dgates), join(dbeta), dS0]


def _scan(name: str) -> Scan:
    return Scan(name, _step, _forward, _backward, value=2, chunked=chunked.delta)


GATED_DELTA = _scan("gated_delta_scan")
KDA = _scan("kda_scan")


def _check(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, has_vector: bool, time: str = "B L"
) -> tuple[tuple[int, ...], int]:
    """The shape of the state, and how many heads share a query and a key."""
    sizes = check_arrays(
        {
            "q": (q, f"{time} G K"),
            "k": (k, f"{time} G K"),
            "v": (v, f"{time} H V"),
            "gates": (gates, f"{time} H K" if has_vector else f"{time} H"),
            "beta": (beta, f"{time} H"),
        }
    )
    check_divides("q", sizes["G"], "the number of v's heads", sizes["H"])
    return (sizes["B"], sizes["H"], sizes["K"], sizes["V"]), sizes["H"] // sizes["G"]


def _run(scan: Scan, inputs: Arrays, seg: int, initial_state: mx.array | None, backend: str | None):
    q, k, *rest = inputs
    shape, each = _check(*inputs, scan is KDA)
    state = check_state(initial_state, shape)
    if each > 1:
        q, k = (mx.repeat(x, each, axis=2) for x in (q, k))
    return scan.run([q, k, *rest], state, rest[0].shape, seg, backend)


def _reference(scan: Scan, inputs: Arrays, initial_state: mx.array | None) -> mx.array:
    q, k, *rest = inputs
    shape, each = _check(*inputs, scan is KDA)
    q, k = (mx.repeat(x, each, axis=2) for x in (q, k))
    return scan.reference([q, k, *rest], check_state(initial_state, shape), rest[0].shape)


def _one(scan: Scan, inputs: Arrays, state: mx.array | None) -> tuple[mx.array, mx.array]:
    q, k, *rest = inputs
    shape, each = _check(*inputs, scan is KDA, "B")
    q, k = (mx.repeat(x, each, axis=1) for x in (q, k))
    return scan.one([q, k, *rest], check_state(state, shape, "state"))


def gated_delta_scan_with_state(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    beta: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule: S' = gate_t S_{t-1}; S_t = S' + beta_t k_t (v_t - S'^T k_t)^T; y_t = S_t^T q_t.

    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464); decay first, then the write on what is left.

    Args:
        q, k: queries, already scaled, and keys, whose length is at most one in models, [B, L, G, K]; G divides H, and
            each is for H / G heads side by side. float32, bfloat16 or float16, as all inputs.
        v: values [B, L, H, V], whose dtype is the output's.
        gates: [B, L, H]; the factor itself, not its logarithm, and any real number.
        beta: strengths of the write [B, L, H], between 0 and 1, or 2, in models; any real number.
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
    return _run(GATED_DELTA, [q, k, v, gates, beta], seg, initial_state, backend)


def gated_delta_scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    beta: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `gated_delta_scan_with_state`, [B, L, H, V]."""
    return gated_delta_scan_with_state(q, k, v, gates, beta, seg, initial_state, backend)[0]


def gated_delta_scan_reference(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, initial_state: mx.array | None = None
) -> mx.array:
    """The output of `gated_delta_scan`, token by token in plain mlx, differentiated by mlx itself."""
    return _reference(GATED_DELTA, [q, k, v, gates, beta], initial_state)


def gated_delta_step(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One token of `gated_delta_scan`, for decoding: inputs without L, state [B, H, K, V] -> (y, the next)."""
    return _one(GATED_DELTA, [q, k, v, gates, beta], state)


def kda_scan_with_state(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    beta: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Kimi Delta Attention: the gated delta rule with a gate a key channel, S' = diag(gate_t) S_{t-1}.

    Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692).

    Args, returns and errors are those of `gated_delta_scan_with_state`, but for gates: [B, L, H, K].
    """
    return _run(KDA, [q, k, v, gates, beta], seg, initial_state, backend)


def kda_scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    beta: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `kda_scan_with_state`, [B, L, H, V]."""
    return kda_scan_with_state(q, k, v, gates, beta, seg, initial_state, backend)[0]


def kda_scan_reference(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, initial_state: mx.array | None = None
) -> mx.array:
    """The output of `kda_scan`, token by token in plain mlx, differentiated by mlx itself."""
    return _reference(KDA, [q, k, v, gates, beta], initial_state)


def kda_step(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One token of `kda_scan`, for decoding: inputs without L, state [B, H, K, V] -> (y, the next)."""
    return _one(KDA, [q, k, v, gates, beta], state)
