"""Sequences in segments on Hopper: the scan over segments of the backward pass, and forward launches that overlap."""

from collections import defaultdict

import pytest
import torch

from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from kernels.matrix.scalar_decay.hopper.test_backend import example, over, plans_of


def test_the_scan_over_segments_runs_on_its_tensors_device(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from holdfast.kernels.matrix.args import DecayAndBeta
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch

    current, ran_on = [], []

    class DeviceOf:
        def __init__(self, x):
            self.x = x

        def __enter__(self):
            current.append(self.x)

        def __exit__(self, *_):
            current.pop()

    scan = defaultdict(lambda: lambda *_, **__: ran_on.append(current[-1] if current else None))
    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(state_launch, "launch", lambda *_: None)
    monkeypatch.setattr(state_launch, "segment_scan_both_ways", scan)
    call = example()
    gates, turn = DecayAndBeta(call.g, None, 1.0), state_launch.ScanOperands(call.k, call.v, None)
    states = state_launch.segment_initial_states(turn, turn, None, gates, 1)
    assert [x.device == states.device and x.shape == states.shape for x in ran_on] == [True]


def test_the_scan_over_segments_in_the_interpreter():
    pytest.importorskip("triton")
    from interpreted import interpret

    assert "1 1 17 33 True" in interpret("kernels.matrix.state_passing.triton.parity", "interpreted")


def test_the_scan_over_segments_compiles():
    pytest.importorskip("triton")
    from holdfast.kernels.matrix.state_passing.triton.segment_scan_backward import segment_scan_both_ways
    from triton_compile import compile_for

    names = ("local_ptr", "decay_ptr", "first_ptr", "back_first_ptr", "enter_ptr", "back_last_ptr")
    pointers = dict.fromkeys(names, torch.float32)
    sizes = {"H": 8, "size": 16384, "segments": 16, "PADDED": 16, "BLOCK": 128, "PDL": True}
    assert compile_for(segment_scan_both_ways, 90, pointers | sizes, num_warps=4).stack == 0


@pytest.mark.gpu
def test_segments_in_a_graph_replay_on_new_numbers():
    # the first segment's blocks start beside those of the launch ahead
    call, fresh = (example(B=1, T=2000, H=4, g=g, device="cuda") for g in ("mild", -0.3))
    (best, *_), _ = plans_of(call)
    plan = over(best.plan, segment_chunks=4)
    expected = Hopper().forward(plan, fresh, None)
    Hopper().forward(plan, call, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Hopper().forward(plan, call, None)
    for x, y in zip(call[:6], fresh[:6], strict=True):
        if x is not None:
            x.copy_(y)
    for _ in range(3):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
