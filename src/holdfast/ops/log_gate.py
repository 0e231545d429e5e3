"""GLA's log decay from what its gate projects, logsigmoid(x) / normalizer, as a custom op: one launch a pass."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common.replay import replayed
from holdfast.kernels.log_gate.torch.backend import PyTorchLogGate
from holdfast.kernels.log_gate.triton.backend import TritonLogGate

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def log_gate(x: Tensor, normalizer: float) -> Tensor:
    """logsigmoid(x) / normalizer of x of any shape [B, ...] and floating dtype, in float32 (float64 for float64).

    normalizer: positive. The kernel reads x as it comes and writes what `gla` takes; elsewhere PyTorch computes.
    """
    return _log_gate(x, float(normalizer))[0]


def _backend_of(x: Tensor) -> TritonLogGate | PyTorchLogGate:
    return TritonLogGate() if can_fuse(x, x, torch.float32) else PyTorchLogGate()


def _forward(x: Tensor, normalizer: float) -> tuple[Tensor]:
    """g, contiguous."""
    with torch.autocast(x.device.type, enabled=False):
        return (_backend_of(x).forward(x, normalizer),)


def _forward_fake(x, normalizer):
    return (x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)),)


def _gradients(dg: Tensor, x: Tensor, normalizer: float) -> Tensor:
    """Of x, contiguous, in its dtype."""
    with torch.autocast(x.device.type, enabled=False):
        return _backend_of(x).backward(x, normalizer, dg)


def _gradients_fake(dg, x, normalizer):
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.normalizer = inputs[1]


def _backward(ctx: Any, dg: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return _log_gate_backward(dg, x, ctx.normalizer), None


_log_gate_backward = replayed(define("log_gate_backward", replayed(_gradients, False), _gradients_fake), False)
_op = define("log_gate", replayed(_forward, False), _forward_fake)
_log_gate = differentiable(_op, _save, _backward, 1, run=replayed(_op, False))
