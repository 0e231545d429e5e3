"""The computation inside chunks as separate PyTorch kernels: scores, decay mask, output, state's part, gate."""

from typing import Any

import torch
import torch.nn.functional as F

from ..case import Case
from ..subject import Refused, Subject


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """Everything between two kernels goes through memory; the decay mask is made in float32."""
    sizes = dict(case.sizes)
    chunk = sizes["C"]
    if sizes["T"] % chunk:
        raise Refused("needs T in whole chunks")

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, chunk)).transpose(2, 3)

    def call(a: dict[str, Any]) -> torch.Tensor:
        q, k, v, total = chunks(a["q"]), chunks(a["k"]), chunks(a["v"]), chunks(a["g"]).cumsum(-1)
        ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(ahead, -torch.inf).exp()
        o = (q @ k.mT * between.to(q.dtype)) @ v
        o = o + (q * total.exp()[..., None].to(q.dtype)) @ a["states"]
        return sizes["K"] ** -0.5 * o.transpose(2, 3).flatten(1, 2) * F.silu(a["gate"])

    return Subject(case.arguments(device), call, lambda a: case.work.exact(a, dict(case.options)), shared=True)
