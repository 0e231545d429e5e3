"""The mixers of holdfast.nn, trained, compiled or decoding: held against themselves in float64 with the step loop.

What the ops compute has oracles of its own; this is about what surrounds them: graphs, lengths, states, packing.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import nn as mixers
from holdfast.kernels.runtime.torch_private import compile_here

from .case import Tensors, offsets
from .judge import Result
from .scenario import Scenario
from .source import Source

MODULES: dict[str, Callable[..., nn.Module]] = {
    "nn.GatedDeltaNet": partial(mixers.GatedDeltaNet, num_heads=2),
    "nn.GatedDeltaProduct": partial(mixers.GatedDeltaProduct, num_heads=2),
    "nn.KDA": partial(mixers.KDA, num_heads=2),
    "nn.DeltaNet": partial(mixers.DeltaNet, num_heads=2),
    "nn.Mamba": mixers.Mamba,
    "nn.Mamba2": partial(mixers.Mamba2, d_state=32),
    "nn.GLA": partial(mixers.GLA, num_heads=2),
    "nn.RetNet": partial(mixers.RetNet, num_heads=2),
    "nn.MLSTM": partial(mixers.MLSTM, num_heads=2),
    "nn.SLSTM": partial(mixers.SLSTM, num_heads=2),
    "nn.RWKV7": partial(mixers.RWKV7, num_heads=2),
    "nn.RGLRU": partial(mixers.RGLRU, num_heads=2),
    "nn.RotLRU": partial(mixers.RotLRU, num_heads=2),
}
_PYTORCH = {"nn.SLSTM": "loop"}


class ModuleCase:
    """A mixer's call and its backward pass, as `case.Case` is an op's: x and weights have gradients."""

    def __init__(self, s: Scenario, n: int, module: nn.Module) -> None:
        self.s, self.module = s, module
        self.kinds: dict[str, str] = {}
        self.has_expanded = False
        source = Source((s.seed * 64 + n) % 2**63)
        x = source.normal(s.B, s.T, s.D).to(s.device, s.torch_dtype)
        self.x = x.requires_grad_()
        self.grad = source.normal(s.B, s.T, s.D).to(s.device, s.torch_dtype)
        self.cu = offsets(s, torch.device(s.device))
        self._found: dict[int, Tensors] = {}

    def both_passes(self, run: Callable[..., Any], module: nn.Module, x: Tensor, grad: Tensor) -> Tensors:
        if self.s.state and self.cu is None and self.s.T > 1:
            half = self.s.T // 2
            first, state = run(x[:, :half])
            second, _ = run(x[:, half:], state)
            y = torch.cat([first, second], 1)
        else:
            y, _ = run(x, None, self.cu)
        weights = dict(module.named_parameters())
        found = torch.autograd.grad(y, [x, *weights.values()], grad, allow_unused=True, materialize_grads=True)
        return {"y": y.detach(), **dict(zip(("dx", *(f"d{name}" for name in weights)), found, strict=True))}

    def by_steps(self) -> Tensors:
        """The outputs of half of x and then of its tokens one by one, on a state in place, at most 16 of them."""
        steps = min(self.s.T - self.s.T // 2, 16)
        with torch.no_grad():
            y, state = self.module(self.x[:, : self.s.T - steps])
            tokens = self.x[:, self.s.T - steps :].split(1, 1)
            return {"y": torch.cat([y, *(self.module.step(token, state) for token in tokens)], 1)}

    def of(self, dtype: torch.dtype, backend: str, draw: int = 0) -> Tensors:
        """The same on a copy of the mixer in a dtype, with a backend; draw: as of `Case.exact`."""
        module, x = copy.deepcopy(self.module).to(dtype), self.x.detach().to(dtype)
        module.backend = backend
        if draw:
            source = Source((self.s.seed + 7927 * draw) % 2**63)
            with torch.no_grad():
                x = self._off(x, source)
                for weight in module.parameters():
                    weight.copy_(self._off(weight, source))
        return self.both_passes(module, module, x.requires_grad_(), self.grad.to(dtype))

    def _off(self, x: Tensor, source: Source) -> Tensor:
        by = (2 * source.uniform(*x.shape) - 1).to(x.device, x.dtype)
        return x * (1 + torch.finfo(self.s.torch_dtype).eps / 2 * by)

    def exact(self, which: int = 0, draw: int = 0) -> Tensors:
        if draw not in self._found:
            self._found[draw] = self.of(torch.float64, "reference", draw)
        return self._found[draw]

    def pytorch_paths(self) -> list[str]:
        return [_PYTORCH.get(self.s.op, "chunked"), "reference"]

    def by_backend(self, backend: str, which: int = 0) -> Tensors:
        return self.of(self.s.torch_dtype, backend)

    def check_unchanged(self) -> None:
        """Weights and x belong to autograd, whose versions would have told."""


def module_calls(s: Scenario) -> list[Result]:
    """Trained at two lengths and two batches, in mode compile as one graph; in mode step decoded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(s.seed % 2**31)
        module = MODULES[s.op](s.D).to(s.device, s.torch_dtype)
    module.backend = None if s.backend == "default" else s.backend
    others = [s, s.longer(1), s.longer(1) if s.cu else replace(s.longer(1), B=s.B + 1), s]
    cases = [ModuleCase(each, n, module) for n, each in enumerate(others)]
    if s.mode == "step":
        return [Result(case, case.by_steps()) for case in cases]
    run: Callable[..., Any] = module
    try:
        if s.mode == "compile":
            torch.compiler.reset()
            run = torch.compile(module, fullgraph=True, backend=compiler(s))
        return [Result(case, case.both_passes(run, module, case.x, case.grad)) for case in cases]
    finally:
        if s.mode == "compile":
            torch.compiler.reset()


def compiler(s: Scenario) -> str:
    """What compiles, here and in the workers of this process alone."""
    if "inductor" not in s.options:
        return "aot_eager"
    # workers run side by side already
    compile_here()
    return "inductor"
