"""What every scan shares: the choice of path, the custom gradient, and the plain loop that the others are held to.

A recurrence brings one step in plain mlx and a pair of launches of kernels, forward and backward. From the step come
its reference and the path for machines whose mlx has no GPU, unless it brings a faster form for those. That path keeps
the state between spans of tokens and runs each span again in the backward pass, as the kernels do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .check import check_backend, check_count

DEFAULT_SEG = 32
# Tokens whose intermediate values the plain path holds at a time in the chunked form; shorter calls than the least are
# faster token by token. `benchmarks/mlx_scans.py --loop` times both.
SPAN = 512
LEAST_CHUNKED = 24
Arrays = Sequence[mx.array]


@dataclass(frozen=True)
class Scan:
    """A recurrence over axis 1 of its inputs, with a float32 state.

    Attributes:
        name: of the public function, for messages.
        step: `step(*inputs at one token, state) -> (y at that token, state)`, plain differentiable mlx in float32.
        forward: `forward(inputs, state, seg) -> (y, final state)`, by kernels.
        backward: `backward(inputs, state, y, grad_y, grad_final, seg) -> [gradient of each input, of the state]`, by
            kernels; gradients in any dtype.
        value: which input gives y its dtype.
        constants: how many of the last inputs have no time axis.
        chunked: `chunked(inputs, state) -> (y, final state)`, differentiable plain mlx in float32 without a step for
            each token; by default the plain path is the loop.
    """

    name: str
    step: Callable[..., tuple[mx.array, mx.array]]
    forward: Callable[[Arrays, mx.array, int], tuple[mx.array, mx.array]]
    backward: Callable[[Arrays, mx.array, mx.array, mx.array, mx.array, int], list[mx.array]]
    value: int
    constants: int = 0
    chunked: Callable[[Arrays, mx.array], tuple[mx.array, mx.array]] | None = None

    def run(
        self, inputs: Arrays, state: mx.array, y_shape: Sequence[int], seg: int, backend: str | None
    ) -> tuple[mx.array, mx.array]:
        """y and the final state on the path that this machine has, or on the one named, with gradients through both.

        Raises ValueError for a seg that is not positive, and for a backend that is unknown or cannot run here.
        """
        check_count("seg", seg)
        path = choose_path(backend)
        if 0 in y_shape:
            return mx.zeros(y_shape, inputs[self.value].dtype), state
        y, final = _differentiable(self, path, seg)(*inputs, state)
        return y, final

    def loop(self, inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
        """Token by token in plain mlx, differentiable by mlx itself; y in the value's dtype.

        In float32, or in float64 (which mlx has on CPUs) for a float64 state.
        """
        wide = [x.astype(state.dtype) for x in inputs]
        moving, fixed = self._moving(wide), self._fixed(wide)
        # split rather than index: the gradient of a split is one concatenation
        columns = [[token.squeeze(1) for token in mx.split(x, x.shape[1], axis=1)] for x in moving]
        ys = []
        for tokens in zip(*columns, strict=True):
            y, state = self.step(*tokens, *fixed, state)
            ys.append(y)
        return mx.stack(ys, axis=1).astype(inputs[self.value].dtype), state

    def reference(self, inputs: Arrays, state: mx.array, y_shape: Sequence[int]) -> mx.array:
        """y of `loop`, empty sequences included."""
        return mx.zeros(y_shape, inputs[self.value].dtype) if 0 in y_shape else self.loop(inputs, state)[0]

    def one(self, inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
        """One token: the inputs without their time axis."""
        y, state = self.step(*[x.astype(mx.float32) for x in inputs], state)
        return y.astype(inputs[self.value].dtype), state

    def _moving(self, inputs: Arrays) -> Arrays:
        return inputs[: len(inputs) - self.constants]

    def _fixed(self, inputs: Arrays) -> Arrays:
        return inputs[len(inputs) - self.constants :]

    def plain(self, inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
        """`loop`, or the chunked form of as many tokens."""
        if self.chunked is None or inputs[0].shape[1] < LEAST_CHUNKED:
            return self.loop(inputs, state)
        y, state = self.chunked([x.astype(mx.float32) for x in inputs], state)
        return y.astype(inputs[self.value].dtype), state

    def _spans(self, inputs: Arrays, span: int) -> list[Arrays]:
        cuts = list(range(span, inputs[0].shape[1], span))
        fixed = self._fixed(inputs)
        return [
            [*part, *fixed] for part in zip(*(mx.split(x, cuts, axis=1) for x in self._moving(inputs)), strict=True)
        ]

    def _plain_forward(self, inputs: Arrays, state: mx.array, seg: int) -> tuple[mx.array, mx.array]:
        """`plain`, a span at a time, so that no more than a span's intermediate values are there."""
        ys = []
        for part in self._spans(inputs, self._span(seg)):
            y, state = self.plain(part, state)
            ys.append(y)
        return mx.concatenate(ys, axis=1), state

    def _span(self, seg: int) -> int:
        return seg if self.chunked is None else SPAN

    def _plain_backward(
        self, inputs: Arrays, state: mx.array, grad_y: mx.array, grad_final: mx.array, seg: int
    ) -> list[mx.array]:
        """The gradient of `plain`, a span at a time from the last, from the states between spans."""
        span = self._span(seg)
        segments = self._spans(inputs, span)
        cuts = range(span, grad_y.shape[1], span)
        states = [state]
        for part in segments[:-1]:
            states.append(self.plain(part, states[-1])[1])
        grads, fixed_grads, grad = [], [], grad_final
        parts = zip(segments, states, mx.split(grad_y, list(cuts), axis=1), strict=True)
        for part, entering, grad_part in reversed(list(parts)):
            _, found = mx.vjp(lambda *xs: self.plain(xs[:-1], xs[-1]), [*part, entering], [grad_part, grad])
            moving = len(part) - self.constants
            grads.append(found[:moving])
            fixed_grads.append([g.astype(mx.float32) for g in found[moving:-1]])
            grad = found[-1]
        moving = [mx.concatenate(xs[::-1], axis=1) for xs in zip(*grads, strict=True)]
        return [*moving, *(sum(xs) for xs in zip(*fixed_grads, strict=True)), grad]


def metal_missing() -> str | None:
    """Why Metal kernels cannot run here, or None."""
    if not mx.metal.is_available():
        return "mlx has no Metal device here"
    if mx.default_device().type != mx.DeviceType.gpu:
        return "mlx's default device is the CPU; mx.set_default_device(mx.gpu) selects Metal"
    return None


def cuda_missing() -> str | None:
    """Why kernels of MLX's CUDA back end cannot run here, or None."""
    if not mx.cuda.is_available():
        return "this mlx has no CUDA back end"
    if mx.default_device().type != mx.DeviceType.gpu:
        return "mlx's default device is the CPU; mx.set_default_device(mx.gpu) selects CUDA"
    return None


def choose_path(backend: str | None = None) -> str:
    """'metal' where Metal runs, 'cuda' where MLX's CUDA back end does, else 'mlx', the plain path; or the one named.

    Raises ValueError for an unknown name, and for 'metal' or 'cuda' where it cannot run, with the reason.
    """
    check_backend(backend)
    if backend == "mlx":
        return backend
    for path, missing in (("metal", metal_missing), ("cuda", cuda_missing)):
        if backend in (None, path):
            reason = missing()
            if reason is None:
                return path
            if backend == path:
                raise ValueError(f"backend: {path!r} cannot run: {reason}")
    return "mlx"


@cache
def _differentiable(scan: Scan, path: str, seg: int):
    """The scan as a function of (*inputs, state) with its own gradient, which mlx asks for only where it is wanted."""

    @mx.custom_function
    def function(*given):
        if path != "mlx":
            return tuple(scan.forward(given[:-1], given[-1], seg))
        return scan._plain_forward(given[:-1], given[-1], seg)

    @function.vjp
    def function_vjp(given, grads, outputs):
        inputs, state = given[:-1], given[-1]
        if path != "mlx":
            found = scan.backward(inputs, state, outputs[0], *grads, seg)
        else:
            found = scan._plain_backward(inputs, state, *grads, seg)
        return tuple(g.astype(x.dtype) for g, x in zip(found, given, strict=True))

    return function
