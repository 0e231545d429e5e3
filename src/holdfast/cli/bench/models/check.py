"""Whether a mixer is right on this device: its bfloat16 run beside its own float64 run by plain PyTorch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.nn import SLSTM
from holdfast.nn.stack import Stack
from holdfast.ops.parity import relative_error

from ...language_model import autocast
from ..measure import LIMITS
from .mixers import Mixer
from .scale import Scale

# Steps before the one that is taken alone.
PREFIX = 16


@dataclass(frozen=True)
class Checked:
    """error: the largest relative error, limit: what it may be, wrong: what is off, "" if nothing is."""

    wrong: str = ""
    error: float | None = None
    limit: float | None = None


def both_passes(layer: nn.Module, x: Tensor, dtype: str = "bfloat16") -> Callable[[], list[Tensor]]:
    """A function that returns output, gradient of x and of each parameter, under autocast to dtype."""
    x = x.detach().requires_grad_()
    wanted = [x, *layer.parameters()]
    draw = torch.Generator().manual_seed(1)
    # the same for every dtype
    cotangent = torch.randn(x.shape, generator=draw, dtype=torch.float32).bfloat16().to(x.device)

    def run() -> list[Tensor]:
        with autocast(x.device, dtype):
            y, _ = layer(x)
        return [y.detach(), *torch.autograd.grad(y, wanted, cotangent.to(y.dtype), materialize_grads=True)]

    return run


def plain(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy by the PyTorch backends."""
    found = copy.deepcopy(layer).to(dtype)
    for module in found.modules():
        if hasattr(module, "backend"):
            module.backend = "loop" if isinstance(module, Stack | SLSTM) else "chunked"
    return found


def one_step(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of the last token of x, taken alone after the state that the others leave."""
    _, state = layer(x[:, :-1])
    return layer(x[:, -1:], state)[0]


def _compare(names: list[str], got: list[Tensor], same: list[Tensor], exact: list[Tensor]) -> Checked:
    """At most twice the error of plain PyTorch in the same dtype, and what a kernel alone may be off besides."""
    worst = Checked(error=0.0)
    for name, x, like, true in zip(names, got, same, exact, strict=True):
        error = relative_error(x.double(), true)
        limit = 2 * relative_error(like.double(), true) + LIMITS["bfloat16"]
        if not error <= limit:
            return Checked(f"relative error {error:.1e} of {name}, limit {limit:.1e}", error, limit)
        if error >= (worst.error or 0.0):
            worst = Checked("", error, limit)
    return worst


def check(mixer: Mixer, scale: Scale, device: torch.device) -> Checked:
    """Output and gradients at scale.checked; and one step with a state against the whole, for mixers that take one."""
    torch.manual_seed(0)
    with device:
        layer = mixer.make(scale.width, scale.head, scale.narrow).to(torch.float32)
        x = torch.randn(*scale.checked, scale.width, dtype=torch.float32)
    got = both_passes(layer, x)()
    names = ["the output", "the gradient of x", *(f"the gradient of {name}" for name, _ in layer.named_parameters())]
    for name, tensor in zip(names, got, strict=True):
        if not tensor.isfinite().all():
            return Checked(f"{name} is not finite")
    if not mixer.exact:
        return Checked()
    same, exact = plain(layer, torch.float32), plain(layer, torch.float64)
    found = _compare(names, got, both_passes(same, x)(), both_passes(exact, x.double(), "float64")())
    if found.wrong or not mixer.steps:
        return found
    x = x[:, : PREFIX + 1]
    with torch.no_grad():
        whole = exact(x.double())[0][:, -1:]
        with autocast(device, "bfloat16"):
            step, like = one_step(layer, x), same(x)[0][:, -1:]
    stepped = _compare(["a step's output"], [step], [like], [whole])
    return stepped if stepped.wrong else found
