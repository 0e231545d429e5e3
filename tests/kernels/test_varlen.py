"""What is read on the host cannot be captured in a CUDA graph, and says so; no GPU runs here."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels.dense.cuda.varlen import groups
from holdfast.kernels.dense.torch import time_loop as loop
from holdfast.kernels.dense.varlen_schedule import make_schedule
from holdfast.kernels.diagonal.boundary_states import BoundarySteps
from holdfast.kernels.varlen import buckets, on_device, sequence_bounds

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_offsets_are_not_read_in_a_capture(capturing):
    assert sequence_bounds(torch.tensor([0, 3, 5]), 5) == [0, 3, 5]
    with pytest.raises(RuntimeError, match="cu_seqlens: its offsets are read on the host"):
        sequence_bounds(SimpleNamespace(is_cuda=True), 5)


def test_offsets_on_the_host_are_not_copied_in_a_capture(capturing):
    bounds, gpu = torch.tensor([0, 3, 5]), torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: expected offsets on cuda:0, .*; got offsets on cpu"):
        on_device(bounds, 5, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got a backend that groups the sequences on the host"):
        buckets([0, 3, 5], gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        BoundarySteps.of(bounds, 5, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        make_schedule(1, 5, bounds, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        groups(bounds, 5, 4, gpu)
    # a call of CPU tensors captures nothing
    assert on_device(bounds, 5, CPU).equal(bounds)
    assert len(buckets([0, 3, 5], CPU)) == 2


def test_the_step_loop_does_not_read_resets_in_a_capture(capturing):
    call = SimpleNamespace(reset=SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match="reset: this backend reads it on the host"):
        loop._resets(call, None)
