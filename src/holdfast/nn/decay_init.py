"""Starting values of the decay of Mamba-2 and Gated DeltaNet: g = -exp(A_log) softplus(a + dt_bias).

Source: Gu, Dao 2023, Mamba (arXiv:2312.00752), section 3.6; Dao, Gu 2024 (arXiv:2405.21060).
"""

import math

import torch
from torch import Tensor


def initial_A_log(heads: int) -> Tensor:
    """log(A) [heads], A uniform between 1 and 16."""
    return torch.empty(heads).uniform_(1, 16).log()


def initial_dt_bias(heads: int) -> Tensor:
    """b [heads] such that softplus(b) is log-uniform between 0.001 and 0.1."""
    dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return dt + torch.log(-torch.expm1(-dt))
