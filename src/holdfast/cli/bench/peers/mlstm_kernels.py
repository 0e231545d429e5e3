"""mlstm_kernels (Tiled Flash Linear Attention): the chunkwise kernel with sigmoid input gate."""

from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject

CHUNK = 128


def _swap(inputs: dict[str, Any]) -> dict[str, Any]:
    """[B, T, H, ...] to [B, H, T, ...] and back."""
    return {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """Layout [B, H, T, D], steps in whole chunks."""
    if dict(case.options).get("gating") != "sigmoid":
        raise Refused("the exponential gate's kernel crashes Triton 3.6's compiler; the sigmoid gate's is measured")
    if dict(case.sizes)["T"] % CHUNK:
        raise Refused(f"needs T in whole chunks of {CHUNK}")
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

    inputs = _swap(case.arguments(device))

    def call(a: dict[str, Any]) -> torch.Tensor:
        return mlstm_siging_chunkwise__xl_chunk(**a, chunk_size=CHUNK, autocast_kernel_dtype=case.torch_dtype)

    def exact(a: dict[str, Any]) -> torch.Tensor:
        return case.work.exact(_swap(a), dict(case.options)).transpose(1, 2)

    return Subject(inputs, call, exact)
