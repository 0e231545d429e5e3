"""Modules over ranks beside the same module in one process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast import nn as hnn
from holdfast.parallel import context_parallel

from .op_cases import Setting, held_by, owners, parts, weights

WIDTH = 8
MIXERS = {
    "GLA": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
    "Mamba2": {"num_heads": 4, "d_state": 3},
    "MLSTM": {"num_heads": 2, "input_gate_bias": 0.0},
    "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "num_v_heads": 4},
    "GatedDeltaProduct": {"num_heads": 2, "num_v_heads": 4, "forget_gate": False},
    "KDA": {"num_heads": 2, "num_v_heads": 4},
    "RWKV7": {"num_heads": 2},
    "RGLRU": {"num_heads": 2},
    "RotLRU": {"num_heads": 2},
}


class Block(nn.Module):
    """A residual block as in a language model."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))[0]
        return x + self.mlp(x)


def made(name: str) -> nn.Module:
    """A mixer, or all of them one above another, in float64; the same on every rank."""
    torch.manual_seed(5)
    if name == "model":
        mixers = [getattr(hnn, mixer)(WIDTH, **arguments) for mixer, arguments in MIXERS.items()]
        return nn.Sequential(*(Block(mixer) for mixer in mixers)).double()
    return getattr(hnn, name)(WIDTH, **MIXERS[name]).double()


def state_for(mixer: nn.Module, sequences: int) -> tuple[Tensor, ...]:
    """A state that a first piece of text left, other than zeros."""
    torch.manual_seed(6)
    _, state = mixer(torch.randn(sequences, 5, WIDTH, dtype=torch.float64))
    return tuple(x.detach() for x in state)


def fresh(state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    if state is None:
        return None
    return tuple(x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in state)


def differences(here: nn.Module, whole: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for (name, x), y in zip(here.named_parameters(), whole.parameters(), strict=True):
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        dist.all_reduce(grad)
        found[f"d{name}"] = (grad, torch.zeros_like(y) if y.grad is None else y.grad)
    return found


def check(found: dict[str, tuple[Tensor, Tensor]], tolerance: float) -> None:
    wrong = {}
    for key, (x, right) in found.items():
        assert x.shape == right.shape, f"{key}: {list(x.shape)} for {list(right.shape)}"
        error = (x - right).abs().max().item() if x.numel() else 0.0
        if not error <= tolerance:
            wrong[key] = error
    assert not wrong, str(wrong)


def mixer_equals_one_process(rank: int, size: int, name: str, setting: Setting, tolerance: float) -> None:
    whole = made(name)
    cu_seqlens = None if setting.bounds is None else torch.tensor(setting.bounds)
    sequences = setting.batch if cu_seqlens is None else len(setting.bounds) - 1
    own = parts(setting.lengths, setting.layout)[rank]
    given = state_for(whole, sequences) if setting.initial else None
    x = torch.randn(1 if setting.bounds else setting.batch, sum(setting.lengths), WIDTH, dtype=torch.float64)
    here = context_parallel(copy.deepcopy(whole), dist.group.WORLD, setting.layout)

    def run(module: nn.Module, x: Tensor, share: Any, times: float) -> Any:
        x, state = x.clone().requires_grad_(), fresh(given)
        y, after = module(x, state, cu_seqlens)
        loss = (y * share).sum() + times * sum((s * weights(s, 2)).sum() for s in after if s.is_floating_point())
        loss.backward()
        return y, after, x.grad, state

    all_weights = weights(x, 1)
    y, after, dx, state = run(whole, x, all_weights, 1 if setting.bounds else size)
    mine, left, dmine, state_here = run(here, held_by(x, own), held_by(all_weights, own), 1)

    found = {"y": (mine, held_by(y, own)), "dx": (dmine, held_by(dx, own))} | differences(here, whole)
    ends = torch.ones(sequences, dtype=torch.bool)
    if setting.bounds is not None:
        ends = torch.tensor([owner == rank for owner in owners(setting)])
    for n, (s, right) in enumerate(zip(left, after, strict=True)):
        found[f"state {n}"] = (s, torch.where(ends.view(-1, *(1,) * (right.dim() - 1)), right, 0))
    for n, (s, right) in enumerate(zip(state_here or (), state or (), strict=True)):
        if right.is_floating_point():
            grad = torch.zeros_like(s) if s.grad is None else s.grad
            dist.all_reduce(grad)
            found[f"dstate {n}"] = (grad, right.grad)
    check(found, tolerance)


def model_equals_one_process(rank: int, size: int, setting: Setting, tolerance: float) -> None:
    whole = made("model")
    own = parts(setting.lengths, setting.layout)[rank]
    x = torch.randn(setting.batch, sum(setting.lengths), WIDTH, dtype=torch.float64)
    here = context_parallel(copy.deepcopy(whole), dist.group.WORLD, setting.layout)
    y = whole(x)
    y.square().mean().backward()
    mine = here(held_by(x, own))
    (mine.square().sum() / y.numel()).backward()
    check({"y": (mine, held_by(y, own))} | differences(here, whole), tolerance)
    again = context_parallel(here, None)(x)
    check({"taken back": (again, y)}, 0.0)
