"""rotlru_scan: the linear scan on pairs of channels that shrink and turn, a complex diagonal."""

import mlx.core as mx

from . import chunked
from .chassis import DEFAULT_SEG, Arrays, Scan
from .check import check_arrays, check_state
from .kernel import SIMD_WIDTH, Kernel

# Tokens whose loads are in flight together; registers, seven floats each in the backward pass.
AHEAD = 4

FORWARD = Kernel("rotlru_forward", ("a", "cs", "sn", "x", "h0"), ("y", "last"))
BACKWARD = Kernel(
    "rotlru_backward", ("a", "cs", "sn", "h0", "y", "dy", "dlast"), ("da", "dcs", "dsn", "dx", "dh0"), ("rotlru",)
)


def _step(a: mx.array, cs: mx.array, sn: mx.array, x: mx.array, h: mx.array) -> tuple[mx.array, mx.array]:
    u, w = h[..., 0::2], h[..., 1::2]
    turned = mx.stack([a * (cs * u - sn * w), a * (sn * u + cs * w)], axis=-1)
    h = turned.reshape(h.shape) + x
    return h, h


def _forward(inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
    a, x = inputs[0], inputs[3]
    y, last = FORWARD(
        inputs=[*inputs, state],
        template={"Y": x.dtype, "AHEAD": AHEAD, "P": a.shape[2]},
        grid=(a.shape[2], a.shape[0], 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=[(x.shape, x.dtype), (state.shape, mx.float32)],
    )
    return y, last


def _backward(
    inputs: Arrays, state: mx.array, y: mx.array, grad_y: mx.array, grad_final: mx.array, seg: int
) -> list[mx.array]:
    a, cs, sn, x = inputs
    return BACKWARD(
        inputs=[a, cs, sn, state, y, grad_y, grad_final],
        template={"A": a.dtype, "CS": cs.dtype, "SN": sn.dtype, "X": x.dtype, "AHEAD": AHEAD, "P": a.shape[2]},
        grid=(a.shape[2], a.shape[0], 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=[*((z.shape, z.dtype) for z in inputs), (state.shape, mx.float32)],
    )


SCAN = Scan("rotlru_scan", _step, _forward, _backward, value=3, chunked=chunked.rotlru)


def _check(a: mx.array, cs: mx.array, sn: mx.array, x: mx.array) -> tuple[int, int]:
    """B and the number of channels."""
    sizes = check_arrays({name: (z, "B L P") for name, z in (("a", a), ("cs", cs), ("sn", sn))} | {"x": (x, "B L D")})
    _check_pairs(sizes)
    return sizes["B"], sizes["D"]


def _check_pairs(sizes: dict[str, int]) -> None:
    if sizes["D"] != 2 * sizes["P"]:
        raise ValueError(f"x: expected {2 * sizes['P']} channels, two for each of a's {sizes['P']}; got {sizes['D']}")


def rotlru_scan_with_state(
    a: mx.array,
    cs: mx.array,
    sn: mx.array,
    x: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Rotational linear recurrent unit, the scan alone: h_t = a_t e^(i theta_t) h_{t-1} + x_t on pairs of channels.

    Source: Orvieto et al. 2023, Resurrecting Recurrent Neural Networks for Long Sequences (arXiv:2303.06349), with a
    magnitude and an angle for each token.

    Args:
        a: magnitudes [B, L, D / 2], any real numbers. float32, bfloat16 or float16, as all inputs.
        cs, sn: cosine and sine of theta [B, L, D / 2]; mlx carries their gradients on to theta.
        x: inputs [B, L, D], pairs interleaved (real, imaginary), whose dtype is the output's.
        seg: tokens between kept states on the plain path. The Metal path of a diagonal scan keeps only its output.
        initial_state: float32 [B, D], pairs interleaved; zeros by default.
        backend: "metal", "cuda" or "mlx"; by default the kernels where they run, else plain mlx.

    Returns:
        h [B, L, D] in x's dtype, and the final state, float32 [B, D]. Gradients, in the dtypes of what they belong to,
        flow through both to every input and initial_state.

    Raises:
        TypeError, ValueError: for an argument of the wrong type, dtype or shape, or a backend that cannot run, named in
            the message.
    """
    state = check_state(initial_state, _check(a, cs, sn, x))
    return SCAN.run([a, cs, sn, x], state, x.shape, seg, backend)


def rotlru_scan(
    a: mx.array,
    cs: mx.array,
    sn: mx.array,
    x: mx.array,
    seg: int = DEFAULT_SEG,
    initial_state: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """The output of `rotlru_scan_with_state`, [B, L, D]."""
    return rotlru_scan_with_state(a, cs, sn, x, seg, initial_state, backend)[0]


def rotlru_scan_reference(
    a: mx.array, cs: mx.array, sn: mx.array, x: mx.array, initial_state: mx.array | None = None
) -> mx.array:
    """The output of `rotlru_scan`, token by token in plain mlx, differentiated by mlx itself."""
    return SCAN.reference([a, cs, sn, x], check_state(initial_state, _check(a, cs, sn, x)), x.shape)


def rotlru_step(
    a: mx.array, cs: mx.array, sn: mx.array, x: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """One token of `rotlru_scan`, for decoding: a, cs, sn [B, D / 2], x and the state [B, D] -> (h, the next state)."""
    sizes = check_arrays({name: (z, "B P") for name, z in (("a", a), ("cs", cs), ("sn", sn))} | {"x": (x, "B D")})
    _check_pairs(sizes)
    return SCAN.one([a, cs, sn, x], check_state(state, (sizes["B"], sizes["D"]), "state"))
