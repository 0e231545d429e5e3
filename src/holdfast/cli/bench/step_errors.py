"""How an output's error grows over the steps: percentiles of the absolute error, step by step."""

import torch
from torch import Tensor

from .subject import Refused

PERCENTILES = (50, 90, 100)


def step_errors(got: Tensor, exact: Tensor, steps: int) -> dict[str, list[float]]:
    """Percentile -> absolute error of each step, over all other axes. got and exact: [B, T, ...].

    Raises Refused where axis 1 is not the steps'.
    """
    if got.shape[1] != steps:
        raise Refused(f"its output's second axis has {got.shape[1]} entries, not the {steps} steps")
    error = (got.double() - exact).abs().transpose(0, 1).flatten(1)
    levels = torch.tensor([p / 100 for p in PERCENTILES], dtype=torch.float64, device=error.device)
    found = torch.quantile(error, levels, dim=1)
    return {str(p): row.tolist() for p, row in zip(PERCENTILES, found.cpu(), strict=True)}
