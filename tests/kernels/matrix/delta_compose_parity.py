"""The delta rule's scan over segments against a loop, in Triton's interpreter."""

import torch

from holdfast.kernels.matrix.hopper_delta_compose import compose
from parity import relative_error


def interpreted():
    """With and without a first state, at widths that tiles do not divide."""
    torch.manual_seed(0)
    K, V = 40, 24
    for B, H, segments, given in ((2, 1, 2, False), (1, 2, 4, False), (2, 2, 2, True), (1, 2, 3, True)):
        local = torch.randn(B, segments - 1, H, K, V)
        transition = torch.randn(B, segments - 1, H, K, K) * K**-0.5
        first = torch.randn(B, H, K, V) if given else None
        enter = torch.full((B, segments, H, K, V), torch.nan)
        constants = {"KEYS": K, "VALUES": V, "WIDE": 64, "BLOCK": 16, "BACK": False}
        compose[(B * H, -(-V // 16))](local, transition, first, enter, H, segments, **constants)
        state = torch.zeros(B, H, K, V, dtype=torch.float64) if first is None else first.double()
        for segment in range(segments):
            assert relative_error(enter[:, segment].double(), state) <= 1e-5
            if segment < segments - 1:
                state = transition[:, segment].double() @ state + local[:, segment].double()
        enter = torch.full((B, segments, H, K, V), torch.nan)
        compose[(B * H, -(-V // 16))](local, transition, first, enter, H, segments, **constants | {"BACK": True})
        state = torch.zeros(B, H, K, V, dtype=torch.float64) if first is None else first.double()
        for segment in reversed(range(segments)):
            assert relative_error(enter[:, segment].double(), state) <= 1e-5
            # the last segment's local has in it what comes after it
            through = transition[:, segment].double().mT @ state if segment < segments - 1 else 0
            state = through + local[:, segment - 1].double()
        print(B, H, K, V, given)
