"""The norm of gradients that lie on several meshes: of shared heads and of layers that every rank has."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of any meshes and of none, which that one does not mix.

    Each parameter counts once, on however many ranks it is. Returns the norm before, the same on every rank; every rank
    calls.
    """
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in kept:
        grad = parameter.grad
        alike[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    norms = [get_total_norm(grads) for grads in alike.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
    for parameter in kept:
        clip_grads_with_norm_([parameter], max_norm, total)
    return total
