"""mamba1: the selective scan of Mamba-1."""

from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.mamba1 import MAMBA1

from . import selective
from .check import prepare


@replayed
def mamba1(
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
    """Selective scan, of each channel d by itself, with a state of N numbers:

        S_n = exp(dt_d A_dn) S_n + dt_d B_n x_d;  y_d = (sum_n C_n S_n + D_d x_d) silu(z_d)

    Source: Gu, Dao 2023, Mamba (arXiv:2312.00752), eq. 2 and algorithm 2; D, z, dt_bias and dt_softplus as in its code.

    Args:
        x: inputs [batch, T, D].
        dt: step sizes [batch, T, D], any floating dtype; dt_bias [D] is added first, softplus taken if dt_softplus.
        A: natural-log decay rate a unit of dt, negative, [D, N], any floating dtype.
        B, C: writes and reads [batch, T, N], or [batch, T, G, N], of x's dtype; group j serves channels j D / G to
            (j + 1) D / G - 1.
        D: skip weight [D], any floating dtype.
        z: output gate before its SiLU, [batch, T, D], of x's dtype.
        initial_state: float32 [sequences, D, N] (float64 for float64 inputs); zeros by default.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: int32 or int64 [sequences + 1], offsets of sequences packed along T, with batch = 1.
        backend: forces a backend by name; by default the one with the least predicted time that can serve the call.

    Returns:
        y [batch, T, D] in x's dtype, and the final state [sequences, D, N] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a backend
            that is unknown or cannot serve the call.
    """
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    given = prepare(MAMBA1, cu_seqlens, arguments | {"initial_state": initial_state})
    mapped = MAMBA1.map(**given, dt_softplus=dt_softplus)
    return selective.run(MAMBA1, mapped, output_final_state, cu_seqlens, backend)
