"""A step of decoding as one CUDA graph, which the host starts at once however many layers it has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.recurrences.torch_private import tree_leaves

# the second call of an op is recorded and the third replayed; a graph is to hold what the third does
WARM_UPS = 3


class CapturedStep:
    """A step that updates its state in place, captured in a CUDA graph and run again on other inputs.

        logits, state = model(prompt)
        step = CapturedStep(model, token, state=state)
        logits = step(token)

    Args:
        step: a module with a method step, such as the mixers of `holdfast.nn`, or any function:
            step(*inputs, state) -> a tensor, or tensors in tuples, lists and dicts. It updates the state in place, and
            reads no values on the host.
        inputs: tensors on a GPU, of the shapes and dtypes of all later calls; their values do not matter.
        state: tensors in tuples, lists and dicts, which from now on belong to this object: each call overwrites them.
            Making it leaves them as they are.

    Raises:
        TypeError: for a step that is neither, or inputs or a state without tensors.
        ValueError: for tensors that are not on an NVIDIA GPU.
    """

    def __init__(self, step: Callable[..., Any] | nn.Module, *inputs: Tensor, state: Any) -> None:
        run = getattr(step, "step", None) if isinstance(step, nn.Module) else step
        if not callable(run):
            raise TypeError(f"step: expected a function, or a module with a method step; got {type(step).__name__}")
        self.state, self._held = state, _tensors("state", state)
        for n, x in enumerate(_tensors("inputs", inputs)):
            if x.device.type != "cuda":
                raise ValueError(f"inputs[{n}]: expected a tensor on an NVIDIA GPU; got one on {x.device}")
        for n, x in enumerate(self._held):
            if x.device != inputs[0].device:
                raise ValueError(f"state: expected tensors on {inputs[0].device}, as the inputs; got {n} on {x.device}")
        self._inputs = [x.detach().clone() for x in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.device(inputs[0].device):
            self._capture(run)

    def _capture(self, run: Callable[..., Any]) -> None:
        before = [x.clone() for x in self._held]
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run(*self._inputs, self.state)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self._graph):
                self._outputs = run(*self._inputs, self.state)
        finally:
            # after an error too: the state may be all that is left of a long prompt
            self.load(before)

    def load(self, state: Any) -> None:
        """Go on from another state, as of another prompt: it is copied into this object's own.

        Raises ValueError for one of other shapes or dtypes.
        """
        given = _tensors("state", state)
        kinds, expected = ([(list(x.shape), x.dtype) for x in held] for held in (given, self._held))
        if kinds != expected:
            raise ValueError(f"state: expected tensors {expected}; got {kinds}")
        with torch.no_grad():
            for held, x in zip(self._held, given, strict=True):
                held.copy_(x)

    def __call__(self, *inputs: Tensor) -> Any:
        """What step returns for these inputs, in memory that the next call overwrites; the state moves on.

        Raises ValueError, TypeError for inputs of another number, shape, dtype or device than it was made for.
        """
        if len(inputs) != len(self._inputs):
            raise TypeError(f"inputs: expected {len(self._inputs)} tensors; got {len(inputs)}")
        for n, (held, x) in enumerate(zip(self._inputs, inputs, strict=True)):
            if not isinstance(x, Tensor):
                raise TypeError(f"inputs[{n}]: expected a tensor; got {type(x).__name__}")
            if (x.shape, x.dtype, x.device) != (held.shape, held.dtype, held.device):
                expected = f"{list(held.shape)}, {held.dtype}, on {held.device}, for which it was captured"
                raise ValueError(f"inputs[{n}]: expected {expected}; got {list(x.shape)}, {x.dtype}, on {x.device}")
            with torch.no_grad():
                held.copy_(x)
        self._graph.replay()
        return self._outputs


def _tensors(name: str, tree: Any) -> list[Tensor]:
    found = [x for x in tree_leaves(tree) if x is not None]
    for x in found:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected tensors; got {type(x).__name__}")
    if not found:
        raise TypeError(f"{name}: expected tensors; got none")
    return found
