"""What the device reaches in this very run: the lines that measured times are held against."""

from dataclasses import dataclass

import torch

from .clock import time_runs


@dataclass(frozen=True)
class Roofs:
    """copy_bandwidth: bytes a second of a copy, read and written. rates: dtype -> operations a second of a square
    matrix product, a multiply-add being two; float32 without TF32. matrix_size: its side."""

    copy_bandwidth: float
    rates: dict[str, float]
    copy_bytes: int
    matrix_size: int


def _copy_ms(moved: int, device: torch.device) -> float:
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_runs(lambda: target.copy_(source), device).median_ms


def roofs(device: torch.device, copy_bytes: int | None = None, matrix_size: int | None = None) -> Roofs:
    """Medians of a large copy and of square matrix products in bfloat16 and float32.

    copy_bytes: moved by one copy, half read and half written. Both default to what fills the device.
    """
    on_gpu = device.type == "cuda"
    copy_bytes = copy_bytes or (2**31 if on_gpu else 2**28)
    matrix_size = matrix_size or (8192 if on_gpu else 1024)
    copy_ms = _copy_ms(copy_bytes, device)
    rates = {}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for dtype in (torch.bfloat16, torch.float32):
            a, b = torch.randn(2, matrix_size, matrix_size, device=device, dtype=torch.float32).to(dtype)
            times = time_runs(lambda a=a, b=b: a @ b, device)
            rates[str(dtype).removeprefix("torch.")] = 2 * matrix_size**3 / (times.median_ms / 1e3)
    finally:
        torch.set_float32_matmul_precision(before)
    return Roofs(copy_bytes / (copy_ms / 1e3), rates, copy_bytes, matrix_size)
