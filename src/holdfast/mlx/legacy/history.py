"""Wires a pair of kernels, the first of which keeps every state for the second."""

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

from ..chassis import Scan, choose_path

Arrays = Sequence[mx.array]
Forward = Callable[[Arrays], tuple[mx.array, mx.array]]
Backward = Callable[[Arrays, mx.array, mx.array], list[mx.array]]


def run(scan: Scan, forward: Forward, backward: Backward, inputs: Arrays, state: mx.array) -> mx.array:
    """y, by `forward(inputs) -> (y, kept)` and `backward(inputs, kept, grad_y) -> gradients`, or by the plain loop."""
    y_shape = inputs[scan.value].shape
    if choose_path() != "mlx" and 0 not in y_shape:
        return _differentiable(forward, backward)(*inputs)[0]
    return scan.reference(inputs, state, y_shape)


def require_kernels() -> None:
    """Raises ValueError where kernels cannot run, with the reason."""
    if choose_path() == "mlx":
        choose_path("metal")


@cache
def _differentiable(forward: Forward, backward: Backward):
    @mx.custom_function
    def function(*inputs):
        return tuple(forward(inputs))

    @function.vjp
    def function_vjp(inputs, grads, outputs):
        found = backward(inputs, outputs[1], grads[0])
        return tuple(g.astype(x.dtype) for g, x in zip(found, inputs, strict=True))

    return function
