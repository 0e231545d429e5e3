"""The scan over segments against a loop, in Triton's interpreter."""

import torch

from holdfast.kernels.matrix.state_passing.triton.segment_scan_backward import segment_scan_both_ways
from parity import relative_error


def interpreted():
    """Every direction, with and without decay and ends; memory that the kernel leaves unwritten is NaN."""
    torch.manual_seed(0)
    for B, H, segments, size in ((2, 3, 1, 40), (2, 3, 5, 40), (1, 2, 8, 64), (1, 1, 17, 33)):
        for given in (False, True):
            check(B, H, segments, size, given)


def check(B, H, segments, size, given):
    local = torch.randn(2, B, segments, H, size)
    decay = -3 * torch.rand(B, segments, H) if given else None
    if given:
        decay[0, 0] = -1e6
    firsts = [torch.randn(B, H, size) if given else None for _ in range(2)]
    last = torch.full((B, H, size), torch.nan)
    enter = torch.full_like(local, torch.nan)
    padded = 1 << (segments - 1).bit_length()
    segment_scan_both_ways[(B * H, -(-size // 16), 2)](
        local, decay, *firsts, enter, last, H, size, segments, padded, 16, False
    )
    for back in range(2):
        state = torch.zeros(B, H, size, dtype=torch.float64) if firsts[back] is None else firsts[back].double()
        for segment in reversed(range(segments)) if back else range(segments):
            assert relative_error(enter[back, :, segment].double(), state) <= 1e-6
            whole = 1.0 if decay is None else decay[:, segment, :, None].double().exp2()
            state = state * whole + local[back, :, segment].double()
    assert relative_error(last.double(), state) <= 1e-6
    print(B, H, segments, size, given)
