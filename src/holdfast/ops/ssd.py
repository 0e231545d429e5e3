"""ssd: state space duality, Mamba-2's scan."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.scalars import flag
from holdfast.recurrences.ssd import SSD

from . import matrix
from .check import name_of, needs_grad, prepare
from .ssd_op import ssd_forward


@replayed
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """State space duality: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T, y_t = (S_t^T C_t + D x_t) silu(z_t).

    Source: Dao, Gu 2024, Transformers are SSMs (arXiv:2405.21060), eq. 6 to 8.

    Args:
        x: inputs [batch, T, H, P].
        dt: step sizes [batch, T, H], any floating dtype; dt_bias [H] is added first, softplus taken if dt_softplus.
        A: natural-log decay rate a unit of dt, negative: [H], or [H, N] for one a state channel; any floating dtype.
        B, C: writes and reads [batch, T, G, N], of x's dtype; group j serves heads j H / G to (j + 1) H / G - 1.
        D: skip weight [H] or [H, P], any floating dtype.
        z: output gate before its SiLU, [batch, T, H, P], of x's dtype.
        initial_state: float32 [N, H, K=N, V=P], that is [sequences, H, N, P] (float64 for float64 inputs).
        output_final_state, cu_seqlens, backend: as in `simple_gla`.

    Returns:
        y [batch, T, H, P] in x's dtype, and the final state [sequences, H, N, P] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    given = prepare(SSD, cu_seqlens, arguments | {"initial_state": initial_state})
    if given["A"].dim() == 2:
        return matrix.run(SSD, SSD.map(**given, dt_softplus=dt_softplus), output_final_state, cu_seqlens, backend)
    flag("dt_softplus", dt_softplus)
    flag("output_final_state", output_final_state)
    tensors = given.values()
    y, final, *_ = ssd_forward(*tensors, dt_softplus, cu_seqlens, needs_grad(*tensors), name_of(backend))
    return y, final if output_final_state else None
