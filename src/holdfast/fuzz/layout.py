"""Lays a tensor out in memory in the ways that callers do: views, odd offsets, transposed, expanded."""

import torch
from torch import Tensor

from holdfast.kernels.runtime.torch_private import negated

from .source import Source

LAYOUTS = (
    "plain",
    "offset",
    "padded",
    "inner",
    "transposed",
    "reversed",
    "stepped",
    "every_other",
    "negated",
    "expanded",
)


def one_of_all(source: Source) -> str:
    """A layout for a tensor of a mixed call; plain as often as all others."""
    return source.choose(LAYOUTS) if source.integer(2) else "plain"


def lay_out(x: Tensor, layout: str, source: Source) -> Tensor:
    """A tensor of x's shape, dtype and device whose memory is laid out so; of x's values, but for "expanded".

    offset: starts an odd number of elements into its memory. padded: rows are wider in memory. inner: the same, and
    they start inside. transposed: axes 1 and 2 the other way round. reversed: the last axis is the slowest. stepped:
    every second element of the last axis. every_other: every second token. negated: its memory
    holds -x, and PyTorch notes that. expanded: one axis has stride 0.
    """
    if x.dim() == 0:
        return x
    if layout == "offset":
        first = source.choose((1, 3, 7))
        return _filled(x.new_empty(x.numel() + first)[first:].view(x.shape), x)
    if layout in ("padded", "inner"):
        before = source.choose((1, 8)) if layout == "inner" else 0
        width = before + x.shape[-1] + source.choose((1, 3, 8))
        return _filled(x.new_empty(*x.shape[:-1], width)[..., before : before + x.shape[-1]], x)
    if layout == "transposed" and x.dim() > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "reversed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "stepped":
        return _filled(x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2], x)
    if layout == "every_other" and x.dim() > 1:
        return _filled(x.new_empty(x.shape[0], 2 * x.shape[1], *x.shape[2:])[:, ::2], x)
    if layout == "negated" and x.is_floating_point():
        return negated(-x)
    if layout == "expanded":
        axes = [axis for axis, size in enumerate(x.shape) if size > 1]
        if axes:
            axis = source.choose(axes)
            return x.narrow(axis, 0, 1).contiguous().expand(x.shape)
    return x.contiguous()


def _filled(view: Tensor, x: Tensor) -> Tensor:
    return view.copy_(x)


def is_writable(x: Tensor) -> bool:
    """Whether no two elements share memory."""
    return all(stride or size <= 1 for stride, size in zip(x.stride(), x.shape, strict=True)) or not x.numel()


def poison(device: torch.device) -> None:
    """Leaves NaN in the memory that the allocator hands out next."""
    sizes = [2**n for n in range(7, 23 if device.type == "cuda" else 17)]
    blocks = [torch.full((size,), torch.nan, dtype=torch.float32, device=device) for size in sizes for _ in range(2)]
    del blocks
