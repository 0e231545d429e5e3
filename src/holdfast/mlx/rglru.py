"""rglru_scan: the linear scan with real gates, channel by channel."""

import mlx.core as mx

from . import chunked
from .chassis import DEFAULT_SEG, Arrays, Scan
from .check import check_arrays, check_state
from .kernel import SIMD_WIDTH, Kernel

# Tokens whose loads are in flight together; registers, two or three floats each.
AHEAD = 8

FORWARD = Kernel("rglru_forward", ("a", "x", "h0"), ("y", "last"))
BACKWARD = Kernel("rglru_backward", ("a", "h0", "y", "dy", "dlast"), ("da", "dx", "dh0"))


def _step(a: mx.array, x: mx.array, h: mx.array) -> tuple[mx.array, mx.array]:
    h = a * h + x
    return h, h


def _forward(inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
    a, x = inputs
    y, last = FORWARD(
        inputs=[a, x, state],
        template={"Y": x.dtype, "AHEAD": AHEAD, "D": x.shape[2]},
        grid=(x.shape[2], x.shape[0], 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=[(x.shape, x.dtype), (state.shape, mx.float32)],
    )
    return y, last


def _backward(
    inputs: Arrays, state: mx.array, y: mx.array, grad_y: mx.array, grad_final: mx.array, seg: int
) -> list[mx.array]:
    a, x = inputs
    return BACKWARD(
        inputs=[a, state, y, grad_y, grad_final],
        template={"A": a.dtype, "X": x.dtype, "AHEAD": AHEAD, "D": x.shape[2]},
        grid=(x.shape[2], x.shape[0], 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=[(a.shape, a.dtype), (x.shape, x.dtype), (state.shape, mx.float32)],
    )


SCAN = Scan("rglru_scan", _step, _forward, _backward, value=1, chunked=chunked.rglru)


def rglru_scan_with_state(
    a: mx.array,
    x: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Real-gated linear recurrent unit, the scan alone: h_t = a_t h_{t-1} + x_t, channel by channel.

    Source: De et al. 2024, Griffin (arXiv:2402.19427), eq. 4, whose gates `holdfast.mlx.nn.RGLRU` computes.

    Args:
        a: gates [B, L, D], any real numbers, negative and zero too. float32, bfloat16 or float16, as all inputs; gates
            near 1 want float32, since bfloat16 has no number between 0.996 and 1.
        x: inputs [B, L, D], whose dtype is the output's.
        seg: tokens between kept states on the plain path. The Metal path of a diagonal scan keeps only its output.
        initial_state: float32 [B, D]; zeros by default.
        backend: "metal", "cuda" or "mlx"; by default the kernels where they run, else plain mlx.

    Returns:
        h [B, L, D] in x's dtype, and the final state, float32 [B, D]. Gradients, in the dtypes of what they belong to,
        flow through both to a, x and initial_state.

    Raises:
        TypeError, ValueError: for an argument of the wrong type, dtype or shape, or a backend that cannot run, named in
            the message.
    """
    sizes = check_arrays({"a": (a, "B L D"), "x": (x, "B L D")})
    state = check_state(initial_state, (sizes["B"], sizes["D"]))
    return SCAN.run([a, x], state, x.shape, seg, backend)


def rglru_scan(
    a: mx.array,
    x: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `rglru_scan_with_state`, [B, L, D]."""
    return rglru_scan_with_state(a, x, seg, initial_state, backend)[0]


def rglru_scan_reference(a: mx.array, x: mx.array, initial_state: mx.array | None = None) -> mx.array:
    """The output of `rglru_scan`, token by token in plain mlx, differentiated by mlx itself."""
    sizes = check_arrays({"a": (a, "B L D"), "x": (x, "B L D")})
    return SCAN.reference([a, x], check_state(initial_state, (sizes["B"], sizes["D"])), x.shape)


def rglru_step(a: mx.array, x: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """One token of `rglru_scan`, for decoding: a, x [B, D] and the state [B, D] -> (h [B, D], the next state)."""
    sizes = check_arrays({"a": (a, "B D"), "x": (x, "B D")})
    return SCAN.one([a, x], check_state(state, (sizes["B"], sizes["D"]), "state"))
