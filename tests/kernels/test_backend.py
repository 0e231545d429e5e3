"""How a backend is chosen, and what is said when none can be."""

import pytest

from holdfast.kernels.common.backend import choose
from holdfast.planner import Candidate, Device, Plan, Problem


class Stub:
    def __init__(self, name, reason=None):
        self.name, self.reason = name, reason

    def reject(self, problem, device):
        return self.reason

    def candidates(self, problem, device, direction):
        return (Candidate(Plan(self.name)),)


PROBLEM = Problem("gla", "matrix", "float32", (("B", 1), ("T", 8)))
CPU = Device.named("cpu")


def test_the_first_without_a_rejection_runs():
    backends = [Stub("hopper", "needs compute capability 9.0"), Stub("triton"), Stub("chunked")]
    assert choose(backends, PROBLEM, CPU, None).name == "triton"


def test_a_named_backend_never_falls_back():
    backends = [Stub("hopper", "needs compute capability 9.0"), Stub("chunked")]
    with pytest.raises(ValueError, match=r"backend: 'hopper' cannot run gla here: needs compute capability 9.0"):
        choose(backends, PROBLEM, CPU, "hopper")
    assert choose(backends, PROBLEM, CPU, "chunked").name == "chunked"


def test_every_reason_is_given_when_none_can_run():
    backends = [Stub("hopper", "needs compute capability 9.0"), Stub("triton", "needs an NVIDIA GPU")]
    with pytest.raises(ValueError, match=r"no backend can run gla on cpu: hopper: .* triton: needs an NVIDIA GPU"):
        choose(backends, PROBLEM, CPU, None)


def test_sizes_and_plan_values_are_read_by_name():
    assert PROBLEM["T"] == 8
    assert Plan("chunked", (("chunk", 64),))["chunk"] == 64
    with pytest.raises(KeyError, match="no size 'K'"):
        PROBLEM["K"]
    with pytest.raises(KeyError, match="no 'stages'"):
        Plan("chunked")["stages"]


def test_a_driver_name_is_recognised():
    assert Device.recognised("NVIDIA H200") == Device.named("h200")
    assert Device.recognised("NVIDIA GeForce RTX 4090").name == "rtx4090"
    assert Device.recognised("NVIDIA A100-SXM4-80GB").name == "a100"
    assert Device.recognised("NVIDIA A40").name == "a40"
    assert Device.recognised("NVIDIA GeForce GTX 1080") is None


def test_an_unknown_device_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"device: expected one of .*h200.*; got 'h900'"):
        Device.named("h900")
