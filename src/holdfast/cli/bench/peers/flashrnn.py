"""FlashRNN: its CUDA and Triton kernels. Each batch size compiles anew, which shows in the first call."""

from importlib import import_module
from typing import Any

import torch

from ..case import Case
from ..subject import Subject


def _describe_gpu(device_id: int = 0) -> dict[str, int]:
    """The limits that FlashRNN asks of a GPU; its own query does not compile under CUDA 13."""
    gpu = torch.cuda.get_device_properties(device_id)
    return {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": gpu.regs_per_multiprocessor,
        "multiProcessorCount": gpu.multi_processor_count,
        "sharedMemPerBlockOptin": gpu.shared_memory_per_block_optin,
    }


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """x [B, T, G, H, D], R [G, H, D, D] (out, in) and b [G, H, D] as Holdfast has them; h of [S, B, T, H, D]."""
    module = import_module("flashrnn.flashrnn.flashrnn")
    module.get_gpu_info = _describe_gpu

    def call(a: dict[str, Any]) -> torch.Tensor:
        h, _ = module.flashrnn(a["x"], a["R"], a["b"], function=case.op, backend=variant, dtype=case.dtype)
        return h[0]

    return Subject(case.arguments(device), call, lambda a: case.work.exact(a, dict(case.options)), shared=True)
