"""mLSTM's gates on a GPU: two launches in place of the PyTorch mapping's log2(T) passes, a custom op with autograd."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.varlen import sequence_bounds, sequence_count
from holdfast.recurrences.mlstm import Gates

from .registration import define, differentiable


def fused_gates(i: Tensor, f: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, exponential: bool) -> Gates:
    """recurrences.mlstm.gates for float32 results: g, beta, m [B, T, H] and the last m [N, H].

    i, f: [B, T, H] in any dtype but float64. m: float32 [N, H], or None for 0. cu_seqlens: int32 or int64 [N + 1], or
    None, and N is then B. exponential: whether gating is.
    """
    return tuple(_gates(i, f, m, cu_seqlens, exponential))


def can_fuse(i: Tensor, f: Tensor, wide: torch.dtype) -> bool:
    """Whether the kernel runs here: an NVIDIA GPU of compute capability 8.0, Triton, float32 states and a batch that an
    axis of a grid holds."""
    narrow = wide == torch.float32 and torch.float64 not in (i.dtype, f.dtype)
    return i.is_cuda and narrow and i.shape[0] <= 65535 and _serves(i.device.index)


def _serves(index: int) -> bool:
    is_nvidia = torch.version.cuda is not None and find_spec("triton") is not None
    return is_nvidia and torch.cuda.get_device_capability(index) >= (8, 0)


# torch.compiler.assume_constant_result says no more, but imports Dynamo, which takes a second
_serves._dynamo_marked_constant = True


def _forward(
    i: Tensor, f: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g, beta, m [B, T, H] and the last m [N, H]; a head's tokens are side by side."""
    from holdfast.kernels.matrix.mlstm.gates import launch as triton_mlstm_gates
    from holdfast.kernels.runtime.launch import on_device_of

    if cu_seqlens is not None and not (i.is_cuda and torch.cuda.is_current_stream_capturing()):
        sequence_bounds(cu_seqlens, i.shape[1])
    with on_device_of(i):
        return triton_mlstm_gates.forward(i, f, None if m is None else m.contiguous(), cu_seqlens, exponential)


def _by_head(i: Tensor, dtype: torch.dtype) -> Tensor:
    return i.new_empty(i.shape[0], i.shape[2], i.shape[1], dtype=dtype).transpose(1, 2)


def _forward_fake(i, f, m, cu_seqlens, exponential):
    sequences = sequence_count(i, cu_seqlens)
    last = i.new_empty(sequences, i.shape[2], dtype=torch.float32)
    return *(_by_head(i, torch.float32) for _ in range(3)), last


def gradients(
    i: Tensor,
    f: Tensor,
    entry: Tensor | None,
    cu_seqlens: Tensor | None,
    exponential: bool,
    g: Tensor,
    beta: Tensor,
    dg: Tensor | None,
    dbeta: Tensor | None,
    dm: Tensor | None,
    dlast: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of i, f [B, T, H] and entry [N, H], the first m, empty if it was not given; None stands for 0.

    g, beta: as _forward returned them.
    """
    from holdfast.kernels.matrix.mlstm.gates import launch as triton_mlstm_gates
    from holdfast.kernels.runtime.launch import on_device_of

    dg, dbeta = (torch.zeros_like(i, dtype=torch.float32) if x is None else x for x in (dg, dbeta))
    entry = None if entry is None else entry.contiguous()
    with on_device_of(i):
        cotangents = triton_mlstm_gates.Cotangents(dg, dbeta, dm, dlast)
        di, df, dentry = triton_mlstm_gates.backward(i, f, entry, cu_seqlens, exponential, g, beta, cotangents)
    return di, df, i.new_empty(0) if dentry is None else dentry


def _gradients_fake(i, f, entry, cu_seqlens, exponential, g, beta, dg, dbeta, dm, dlast):
    dentry = i.new_empty(0) if entry is None else entry.new_empty(entry.shape, dtype=torch.float32)
    return i.new_empty(i.shape), f.new_empty(f.shape), dentry


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *outputs[:2])
    ctx.exponential = inputs[4]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    i, f, entry, cu_seqlens, g, beta = ctx.saved_tensors
    di, df, dentry = _gates_backward(i, f, entry, cu_seqlens, ctx.exponential, g, beta, *grads[:4])
    return di, df, None if entry is None else dentry


_gates_backward = replayed_below(define("mlstm_gates_backward", replayed_below(gradients), _gradients_fake))
_op = define("mlstm_gates", replayed_below(_forward), _forward_fake)
_gates = differentiable(_op, lambda *_: None, _backward, 3, _save, replayed_below(_op), used=3)
