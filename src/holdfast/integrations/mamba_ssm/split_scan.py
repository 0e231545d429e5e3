"""mamba_ssm's mamba_split_conv1d_scan_combined: Mamba-2's layer behind its first projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..causal_conv1d import causal_conv1d_fn
from .chunk_scan import NO_LIMIT, mamba_chunk_scan_combined
from .gated_norm import gated_norm


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolution, scan, gated norm and last projection of [batch, T, 2 M + 2 H P + 2 G N + H]: a gated product of 2 M
    channels beside the scan, z, x, B, C and dt, of which softplus is taken.

    Args:
        conv1d_weight, conv1d_bias: [H P + 2 G N, W] and [H P + 2 G N] or None.
        dt_bias, A: [H].
        D: [H, P], or [H] with headdim = P.
        chunk_size, state_dtype, initial_states, seq_idx, dt_limit, return_final_states: as in
            `mamba_chunk_scan_combined`. The convolution has no inputs before the first.
        activation: of the convolution, None, "silu" or "swish".
        rmsnorm_weight: [H P], normalised in G groups, gated by z as norm_before_gate says; without it z gates the scan.
        outproj_weight, outproj_bias: [out, M + H P] and [out]; without them there is no projection.

    Returns:
        [batch, T, M + H P], or [batch, T, out]; with return_final_states a tuple of it and the states [batch, H, P, N].

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message, and for a
            combination that is not served.
    """
    heads, width = _heads(D, headdim)
    inner = heads * width
    states = _states(conv1d_weight, inner, ngroups)
    beside = _beside(zxbcdt, inner, ngroups * states, heads)
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias: expected outproj_weight beside it; got None")
    product, z, mixed, dt = zxbcdt.split([beside, inner, conv1d_weight.shape[0], heads], -1)
    mixed = causal_conv1d_fn(mixed.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = mixed.split([inner, ngroups * states, ngroups * states], -1)
    x, gate = (part.unflatten(-1, (heads, width)) for part in (x, z))
    B, C = (part.unflatten(-1, (ngroups, states)) for part in (B, C))
    scan = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, gate if rmsnorm_weight is None else None, dt_bias, initial_states, seq_idx,
        dt_softplus=True, dt_limit=dt_limit, return_final_states=return_final_states, state_dtype=state_dtype,
    )  # fmt: skip
    y, *final = scan if isinstance(scan, tuple) else (scan,)
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        if rmsnorm_weight.shape != (inner,):
            raise ValueError(f"rmsnorm_weight: expected shape [{inner}]; got {list(rmsnorm_weight.shape)}")
        y = gated_norm(y, rmsnorm_weight, z, rmsnorm_eps, inner // ngroups, norm_before_gate)
    if beside:
        first, second = product.chunk(2, -1)
        y = torch.cat([F.silu(first) * second, y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, *final) if final else y


def _heads(D: Tensor, headdim: int | None) -> tuple[int, int]:
    if D.dim() not in (1, 2):
        raise ValueError(f"D: expected shape [H] or [H, P]; got {list(D.shape)}")
    width = headdim if D.dim() == 1 else D.shape[1]
    if width is None:
        raise ValueError("headdim: expected beside D [H], which has no P; got None")
    if headdim not in (None, width):
        raise ValueError(f"headdim: expected P = {width}, as D has; got {headdim}")
    return D.shape[0], width


def _states(conv1d_weight: Tensor, inner: int, ngroups: int) -> int:
    """N, of the channels that are convolved."""
    read = conv1d_weight.shape[0] - inner
    if ngroups < 1 or read <= 0 or read % (2 * ngroups):
        raise ValueError(
            f"conv1d_weight: expected H P + 2 G N = {inner} + {2 * ngroups} N channels; got {conv1d_weight.shape[0]}"
        )
    return read // (2 * ngroups)


def _beside(zxbcdt: Tensor, inner: int, read: int, heads: int) -> int:
    """2 M, of the channels that are no part of the scan."""
    rest = zxbcdt.shape[-1] - 2 * inner - 2 * read - heads
    if zxbcdt.dim() != 3 or rest < 0 or rest % 2:
        raise ValueError(
            f"zxbcdt: expected shape [batch, T, 2 M + {2 * inner + 2 * read + heads}]; got {list(zxbcdt.shape)}"
        )
    return rest
