"""Launches of KDA's gate, one a pass and one of the sums over tokens."""

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.column_sums import column_sums, of_parts
from holdfast.kernels.runtime.launch import launch

from .rows import kda_gate_bwd, kda_gate_fwd

# elements of a tile, 16 a thread
TILE, WARPS = 2048, 4
# programs of all heads that sum the gradients of A_log and dt_bias, each the same tokens in every run
PARTS = 1056


def _shape(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return tokens, tiles of them, and constants."""
    batch, length, heads, width = x.shape
    block = 1 << (width - 1).bit_length()
    rows = max(1, TILE // block)
    return batch * length, -(-batch * length // rows), {"H": heads, "K": width, "BLOCK": block, "ROWS": rows}


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def run_forward(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    """Return the log decay, float32, of x [B, T, H, K]; A_log [H] and dt_bias [H, K] contiguous, or None."""
    x = _dense(x)
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        tokens, tiles, constants = _shape(x)
        numbers = (tokens, x.shape[1], 0.0 if bound is None else bound, *x.stride()[:3])
        constants |= {"BOUNDED": bound is not None}
        launch(kda_gate_fwd, (constants["H"] * tiles,), (x, A_log, dt_bias, g), numbers, constants, WARPS)
    return g


def run_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, dg: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, A_log and dt_bias, contiguous, in their dtypes; None for what is None."""
    x = _dense(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, width = x.shape[2:]
    sums = torch.empty(heads * width + heads, dtype=torch.float32, device=x.device)
    if x.numel():
        tokens, tiles, constants = _shape(x)
        programs = min(max(1, PARTS // heads), tiles)
        parts = torch.empty(programs, sums.numel(), dtype=torch.float32, device=x.device)
        numbers = (tokens, x.shape[1], 0.0 if bound is None else bound, *x.stride()[:3])
        constants |= {"BOUNDED": bound is not None}
        tensors = (x, A_log, dt_bias, dg.contiguous(), dx, parts)
        launch(kda_gate_bwd, (heads * programs,), tensors, numbers, constants, WARPS)
        launch(column_sums, *of_parts(parts, sums))
    else:
        sums.zero_()
    bias, rate = sums[: heads * width].view(heads, width), sums[heads * width :]
    return (
        dx,
        None if A_log is None else rate.to(A_log.dtype),
        None if dt_bias is None else bias.to(dt_bias.dtype),
    )
