"""mamba_ssm's mamba_inner_fn: Mamba-1's layer behind its first projection."""

import torch.nn.functional as F
from torch import Tensor

from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument

from ..causal_conv1d import causal_conv1d_fn
from .gated_norm import gated_norm
from .selective_scan import selective_scan_fn

_ARGUMENTS = {
    "xz": Argument("inputs of the convolution and the output gate", "B 2D T"),
    "conv1d_weight": Argument("taps of each channel", "D 1 W", "float"),
    "conv1d_bias": Argument("what is added to each channel", "D", "float", required=False),
    "x_proj_weight": Argument("rows that make dt, B and C", "rank+N+N D"),
    "delta_proj_weight": Argument("rows that make step sizes of dt", "D rank"),
    "out_proj_weight": Argument("last projection", "out D"),
    "out_proj_bias": Argument("bias of the last projection", "out", "float", required=False),
    "A": Argument("natural-log decay rate a unit of a step", "D N", "float"),
    "B_proj_bias": Argument("added to B", "N", "float", required=False),
    "C_proj_bias": Argument("added to C", "N", "float", required=False),
    "b_rms_weight": Argument("of the norm of B", "N", "float", required=False),
    "c_rms_weight": Argument("of the norm of C", "N", "float", required=False),
    "dt_rms_weight": Argument("of the norm of step sizes", "D", "float", required=False),
}


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Convolution with SiLU, projections to dt, B and C, their norms, scan, output gate and last projection.

    Args:
        xz: [batch, 2 D, T], read fastest where its channels lie side by side.
        conv1d_weight, conv1d_bias: [D, 1, W] and [D] or None.
        x_proj_weight: [rank + 2 N, D], its rows those of dt, B and C; without those of a B or C that is given.
        delta_proj_weight: [D, rank]. out_proj_weight, out_proj_bias: [out, D] and [out] or None.
        A, D, delta_bias, delta_softplus: as in `selective_scan_fn`.
        B, C: [batch, N, T] or [batch, G, N, T], in place of what x_proj_weight makes.
        B_proj_bias, C_proj_bias: [N], added to what x_proj_weight makes.
        checkpoint_lvl: what mamba_ssm computes again in its backward pass; checked, not used.
        b_rms_weight, c_rms_weight, dt_rms_weight: [N], [N] and [D], of RMS norms of B, C and step sizes, behind the
            biases of the first two; without them there are none. b_c_dt_rms_eps is added to their mean squares.

    Returns:
        [batch, T, out]. Gradients go to all tensors, those of the norms too.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message, and for a
            combination that is not served.
    """
    given = {
        "xz": xz, "conv1d_weight": conv1d_weight, "conv1d_bias": conv1d_bias, "x_proj_weight": x_proj_weight,
        "delta_proj_weight": delta_proj_weight, "out_proj_weight": out_proj_weight, "out_proj_bias": out_proj_bias,
        "A": A, "B_proj_bias": B_proj_bias, "C_proj_bias": C_proj_bias, "b_rms_weight": b_rms_weight,
        "c_rms_weight": c_rms_weight, "dt_rms_weight": dt_rms_weight,
    }  # fmt: skip
    for name, beside, x in (("B", ("B_proj_bias", "b_rms_weight"), B), ("C", ("C_proj_bias", "c_rms_weight"), C)):
        _refuse_beside(name, x, {each: given[each] for each in beside})
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl: expected 0 or 1; got {checkpoint_lvl!r}")
    checked = check_arguments(_ARGUMENTS, None, given, _sizes(delta_proj_weight, A, (B is None) + (C is None)))
    x, z = checked["xz"].chunk(2, 1)
    u = causal_conv1d_fn(x, checked["conv1d_weight"][:, 0], checked["conv1d_bias"], activation="silu")
    rank, states = checked["delta_proj_weight"].shape[1], A.shape[1]
    made = F.linear(u.mT, checked["x_proj_weight"])
    delta = _normed(F.linear(made[..., :rank], checked["delta_proj_weight"]), dt_rms_weight, b_c_dt_rms_eps)
    if B is None:
        B = _read(made[..., rank : rank + states], B_proj_bias, b_rms_weight, b_c_dt_rms_eps)
    if C is None:
        C = _read(made[..., made.shape[-1] - states :], C_proj_bias, c_rms_weight, b_c_dt_rms_eps)
    y = selective_scan_fn(u, delta.mT, A, B, C, D, z, delta_bias, delta_softplus).mT
    return F.linear(y, checked["out_proj_weight"], None if out_proj_bias is None else out_proj_bias.to(y.dtype))


def _sizes(delta_proj_weight: Tensor, A: Tensor, made: int) -> dict[str, int]:
    """Axes that others fix, where these have them; a wrong shape of theirs is named by the check."""
    sizes = {"1": 1}
    if isinstance(delta_proj_weight, Tensor) and delta_proj_weight.dim() == 2:
        channels, rank = delta_proj_weight.shape
        sizes |= {"2D": 2 * channels, "D": channels}
        if isinstance(A, Tensor) and A.dim() == 2:
            sizes |= {"rank+N+N": rank + made * A.shape[1]}
    return sizes


def _refuse_beside(name: str, x: Tensor | None, others: dict[str, Tensor | None]) -> None:
    for other, given in others.items():
        if x is not None and given is not None:
            raise ValueError(f"{other}: expected None beside {name}, which it would not reach; got one")


def _read(x: Tensor, bias: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """B or C [batch, N, T] of x [batch, T, N]."""
    x = x if bias is None else x + bias.to(x.dtype)
    return _normed(x, weight, eps).mT


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else gated_norm(x, weight, None, eps, None, norm_before_gate=True)
