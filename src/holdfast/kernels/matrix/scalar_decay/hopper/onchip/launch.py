"""The launch of kernel.py."""

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.compat import gl
from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import round_up_columns, tiles

from .kernel import CHUNKS, scalar_decay_fwd_onchip

_LAYOUTS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (3, 4)}
SEGMENT = CHUNKS.value * TOKENS


def run_onchip(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, gates: DecayAndBeta, start: Tensor | None, end: Tensor
) -> None:
    """out [B, T, H, V] of q, k [B, T, *, K] and v [B, T, *, V]; the state before and after it, float32 [B, H, K, V].

    Raises RuntimeError where its blocks, one for each batch, head and 256 tokens, cannot all run at once.
    """
    batch, length, heads, columns = out.shape
    keys, device = q.shape[3], v.device
    wide, width = round_up_columns(keys), round_up_columns(columns)
    pairs, segments = batch * heads, -(-length // SEGMENT)
    states = torch.empty(2 * pairs * segments, wide, width, dtype=v.dtype, device=device)
    decay = torch.empty(pairs, segments, dtype=torch.float32, device=device)

    def of(x: Tensor, columns: int, tokens: int) -> object:
        return tiles(x, [1, tokens, 1, columns], _LAYOUTS[4])

    arguments = (
        of(q, wide, TOKENS),
        of(k, wide, 2 * TOKENS),
        of(v, width, 2 * TOKENS),
        of(out, width, TOKENS),
        tiles(states, [1, wide, width], _LAYOUTS[3]),
        states,
        gates.g,
        gates.beta,
        start,
        end,
        decay,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        gates.scale,
    )
    types = (*gates.types(), q.dtype, wide, width, start is None)
    constants = {"KEYS": keys, "VALUES": columns}
    launch(scalar_decay_fwd_onchip, (pairs, segments, 1), arguments, constants, width // 16, types, cooperative=True)
