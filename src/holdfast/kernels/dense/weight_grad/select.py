"""dR as one batched product after the loop: dR[g] = sum over tokens of dg h_{t-1}^T.

Of one wide head it is a single product of PyTorch's. Else a kernel cuts it into parts of the tokens: each part writes
its own float32 sums and they are added in order, so that a run repeats bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.dense.cuda.launch import ceil
from holdfast.recurrences.cell import Cell

# One head from here on is one product: at D 768, B 16, T 1024 on an H200 that takes 0.15 ms, the kernel 0.24.
WIDE = 512


def weight_grads(
    cell: Cell,
    dx: Tensor,
    extra: Tensor,
    h: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    db: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return dR [Gr, H, D, D] and db [G, H, D] in dtype, rounded once.

    dx, extra: the gradients of x's gates, and those of the gates that R alone feeds. db: float32 parts of its sum.
    """
    only = [gate for gate in cell.recurrent if gate not in cell.input]
    parts = [partial_weight_grads(dg, h, initial, reset) for dg in ((dx, extra) if only else (dx,))]
    *found, db = sum_partials([*parts, db], dtype)
    if cell.input == cell.recurrent:
        return found[0], db
    gates = dict(zip((*cell.input, *only), (dR for each in found for dR in each), strict=True))
    return torch.stack([gates[gate] for gate in cell.recurrent]), db


def partial_weight_grads(dg: Tensor, h: Tensor, initial: Tensor | None, reset: Tensor | None) -> Tensor:
    """Return float32 parts [n, G, H, D, D] of the sum, from dg [B, T, G, H, D] and h [B, T, H, D] of one 16-bit dtype.

    initial: [B, H, D], rounded to that dtype. reset: bool [B, T]. All contiguous and on the current device.
    h is the state after each step; the product takes the one before it: initial at the first step, none where reset is.
    """
    batch, length, gates, heads, width = dg.shape
    if heads == 1 and width >= WIDE:
        return _one_product(dg, h, initial, reset)
    tokens = batch * length
    tile = 128 if width >= 128 else 64 if width > 32 else 32
    tiles = ceil(width, tile) ** 2
    sms = torch.cuda.get_device_properties(dg.device).multi_processor_count
    # a few blocks an SM; each at least some hundred tokens
    parts = max(1, min(4 * sms // (gates * heads * tiles), tokens // 256))
    part = 64 * ceil(ceil(tokens, parts), 64)
    parts = ceil(tokens, part)
    out = torch.empty(parts, gates, heads, width, width, dtype=torch.float32, device=dg.device)
    # triton comes only with torch's CUDA builds
    from holdfast.kernels.runtime.launch import launch

    from .triton import dense_weight_grad

    mask = None if reset is None else reset.contiguous().view(torch.uint8)
    constants = {"WIDTH": width, "ROWS": tile, "COLUMNS": tile, "TOKENS": 64}
    constants |= {"INITIAL": initial is not None, "RESET": reset is not None}
    grid, warps = (gates * heads, tiles, parts), 8 if tile == 128 else 4
    numbers = (tokens, length, gates, heads, part)
    launch(dense_weight_grad, grid, (dg, h, initial, mask, out), numbers, constants, warps)
    return out


def sum_partials(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Sum float32 [n, ...] over n, in order, and round once to dtype. Contiguous, on the current device."""
    from holdfast.kernels.runtime.launch import launch

    from .triton import dense_sum_partials

    sums = [torch.empty(x.shape[1:], dtype=dtype, device=x.device) for x in parts]
    # two in a launch
    for k in range(0, len(parts), 2):
        pairs = [*zip(parts, sums, strict=True)][k : k + 2]
        sizes = [out.numel() for _, out in pairs] + [0] * (2 - len(pairs))
        (first, first_sum), (second, second_sum) = pairs[0], pairs[-1]
        numbers = (first.shape[0], sizes[0], second.shape[0], sizes[1])
        blocks = sum(ceil(size, 256) for size in sizes)
        launch(dense_sum_partials, (blocks,), (first, first_sum, second, second_sum), numbers, {"BLOCK": 256}, 2)
    return sums


def _one_product(dg: Tensor, h: Tensor, initial: Tensor | None, reset: Tensor | None) -> Tensor:
    before = torch.empty_like(h)
    before[:, 1:] = h[:, :-1]
    # an assigned number would be a tensor on the host, which no recording takes
    if initial is None:
        before[:, 0].zero_()
    else:
        before[:, 0] = initial
    if reset is not None:
        before.masked_fill_(reset[:, :, None, None], 0)
    sums = torch.mm(dg.flatten(0, 1).flatten(1).t(), before.flatten(0, 1).flatten(1), out_dtype=torch.float32)
    return sums.view(1, dg.shape[2], 1, h.shape[3], h.shape[3])
