"""What is read on the host cannot be captured in a CUDA graph, and says so; no GPU runs here."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels.common.varlen import sequence_bounds
from holdfast.kernels.dense import loop


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_offsets_are_not_read_in_a_capture(capturing):
    assert sequence_bounds(torch.tensor([0, 3, 5]), 5) == [0, 3, 5]
    with pytest.raises(RuntimeError, match="cu_seqlens: its offsets are read on the host"):
        sequence_bounds(SimpleNamespace(is_cuda=True), 5)


def test_the_step_loop_does_not_read_resets_in_a_capture(capturing):
    call = SimpleNamespace(reset=SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match="reset: this backend reads it on the host"):
        loop._resets(call, None)
