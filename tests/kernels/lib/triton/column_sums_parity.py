"""The sum of what programs added up, held against PyTorch's in float64."""

import torch

from holdfast.kernels.lib.triton.column_sums import column_sums, of_parts
from holdfast.kernels.runtime.launch import launch


def check(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(count)
    parts = torch.randn(count, *shape, generator=draw).to(device)
    found, again = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    for out in (found, again):
        launch(column_sums, *of_parts(parts, out))
    assert torch.equal(found, again)
    # sums of so many numbers of size 1, rounded to dtype
    exact, size = parts.double().sum(0), count**0.5
    assert ((found - exact).abs() <= 2e-6 * size + torch.finfo(dtype).eps * exact.abs()).all()


def interpreted() -> None:
    """A part and none, columns that fill their blocks and that do not, several axes."""
    for count, shape in ((0, (5,)), (1, (8,)), (257, (13,)), (600, (2, 12))):
        for dtype in (torch.float32, torch.bfloat16):
            check(count, shape, dtype, "cpu")
    print("all checked")
