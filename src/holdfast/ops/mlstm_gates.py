"""mLSTM's gates on a GPU: one launch in place of the PyTorch mapping's log2(T) passes, as a custom op with autograd."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common.varlen import sequence_bounds
from holdfast.recurrences.mlstm import Gates


def fused_gates(i: Tensor, f: Tensor, m: Tensor, cu_seqlens: Tensor | None, exponential: bool) -> Gates:
    """recurrences.mlstm.gates for float32 results: (g, beta, floor, last m)."""
    return tuple(_gates(i, f, m, cu_seqlens, exponential)[:4])


def can_fuse(i: Tensor, f: Tensor, wide: torch.dtype) -> bool:
    """Whether the kernel runs here: an NVIDIA GPU of compute capability 8.0, Triton, and float32 states."""
    return i.is_cuda and wide == torch.float32 and f.dtype != torch.float64 and _serves(i.device.index)


@torch.compiler.assume_constant_result
def _serves(index: int) -> bool:
    is_nvidia = torch.version.cuda is not None and find_spec("triton") is not None
    return is_nvidia and torch.cuda.get_device_capability(index) >= (8, 0)


@torch.library.custom_op("holdfast::mlstm_gates", mutates_args=())
def _gates(
    i: Tensor, f: Tensor, m: Tensor, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g, beta, floor [B, T, H], the last m [N, H] and every m [B, T, H]."""
    from holdfast.kernels.matrix import triton_mlstm_gates

    if cu_seqlens is not None and not (i.is_cuda and torch.cuda.is_current_stream_capturing()):
        sequence_bounds(cu_seqlens, i.shape[1])
    with torch.cuda.device_of(i):
        return triton_mlstm_gates.forward(i, f, m.contiguous(), cu_seqlens, exponential)


@_gates.register_fake
def _(i, f, m, cu_seqlens, exponential):
    every = [i.new_empty(i.shape, dtype=torch.float32) for _ in range(3)]
    last = i.new_empty(m.shape, dtype=torch.float32)
    return (*every, last, i.new_empty(i.shape if exponential else (0,), dtype=torch.float64))


@torch.library.custom_op("holdfast::mlstm_gates_backward", mutates_args=())
def _gates_backward(
    i: Tensor,
    f: Tensor,
    m: Tensor,
    cu_seqlens: Tensor | None,
    exponential: bool,
    every: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dfloor: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of i, f [B, T, H] and m [N, H]."""
    from holdfast.kernels.matrix import triton_mlstm_gates

    with torch.cuda.device_of(i):
        return triton_mlstm_gates.backward(
            i, f, m.contiguous(), cu_seqlens, exponential, every, dg, dbeta, dfloor, dlast
        )


@_gates_backward.register_fake
def _(i, f, m, cu_seqlens, exponential, every, dg, dbeta, dfloor, dlast):
    return i.new_empty(i.shape), f.new_empty(f.shape), m.new_empty(m.shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output[4])
    ctx.exponential = inputs[4]


def _backward(ctx: Any, dg: Tensor, dbeta: Tensor, dfloor: Tensor, dlast: Tensor, _: Tensor) -> tuple[Any, ...]:
    i, f, m, cu_seqlens, every = ctx.saved_tensors
    di, df, dm = _gates_backward(i, f, m, cu_seqlens, ctx.exponential, every, dg, dbeta, dfloor, dlast)
    return di, df, dm, None, None


_gates.register_autograd(_backward, setup_context=_setup)
