"""Where autocast is on around an op, its backends compute without."""

import pytest
import torch

from every_call import CALLS
from holdfast.ops import dense, diagonal, matrix, selective
from holdfast.ops.autocast import without_autocast
from ops.test_problems import module
from parity import leaves

FAMILIES = {
    "simple_gla": matrix, "lstm": dense, "rotlru": diagonal, "mamba1": selective,
    "causal_conv1d": module("causal_conv1d"), "gated_rms_norm": module("gated_rms_norm"),
    "intra_chunk": module("intra_chunk"), "inter_chunk_scan": module("inter_chunk_scan"),
}  # fmt: skip


def test_it_is_off_within_and_as_before_behind():
    x = torch.zeros(1)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(x):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with without_autocast(x):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_both_passes_of_a_backend_run_without(monkeypatch, name):
    seen = []

    def noted(run):
        def call(*arguments, **named):
            seen.append(torch.is_autocast_enabled("cpu"))
            return run(*arguments, **named)

        return call

    for backend in FAMILIES[name].BACKENDS[-2:]:
        for way in ("forward", "backward"):
            monkeypatch.setattr(backend, way, noted(getattr(backend, way)), raising=False)
    given = CALLS[name].arguments(torch.float32)
    wanted = [x.requires_grad_() for x in leaves(given)]
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(CALLS[name](given)[0].sum() if CALLS[name].has_state else CALLS[name](given).sum(), wanted)
    assert seen == [False, False]
