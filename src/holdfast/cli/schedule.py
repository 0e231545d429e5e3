"""Learning rate and optimizer of the training commands."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

WEIGHT_DECAY = 0.1
CLIP = 1.0


def learning_rate(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Linear warm-up, then a cosine from the peak down to `floor` of it. A function of the step: nothing to save."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float = WEIGHT_DECAY) -> torch.optim.AdamW:
    """AdamW that decays matrices only, not biases, norms and decay rates."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95))


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip: Callable[[Iterable[torch.Tensor], float], object] = nn.utils.clip_grad_norm_,
) -> None:
    """One step at the given rate, its gradients clipped."""
    clip(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
