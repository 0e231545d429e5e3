"""Which backends can serve a call, and what is said of those that cannot."""

import pytest
import torch

from holdfast.kernels.backend import Rejected, describe, no_backend_error, usable
from holdfast.planner import Device, Plan, Problem


class Stub:
    def __init__(self, name, reason=None):
        self.name, self.reason = name, reason

    def reject(self, problem, device):
        return self.reason


PROBLEM = Problem("gla", "matrix", "float32", (("B", 1), ("T", 8)))
CPU = Device.named("cpu")
BACKENDS = [Stub("hopper", "needs compute capability 9.0"), Stub("triton"), Stub("chunked")]


def test_those_without_a_rejection_in_order():
    serving, reasons = usable(BACKENDS, PROBLEM, CPU, None)
    assert [backend.name for backend in serving] == ["triton", "chunked"]
    assert reasons == {"hopper": "needs compute capability 9.0"}


def test_a_named_backend_never_falls_back():
    with pytest.raises(
        Rejected, match=r"backend: 'hopper' cannot run gla here: needs compute capability 9.0"
    ) as caught:
        usable(BACKENDS, PROBLEM, CPU, "hopper")
    assert caught.value.reason == "needs compute capability 9.0"
    assert [backend.name for backend in usable(BACKENDS, PROBLEM, CPU, "chunked")[0]] == ["chunked"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of 'hopper', 'triton', 'chunked' for gla; got 'fast'"):
        usable(BACKENDS, PROBLEM, CPU, "fast")


def test_every_reason_is_given_when_none_can_run():
    error = no_backend_error(PROBLEM, CPU, {"hopper": "needs compute capability 9.0", "triton": "needs an NVIDIA GPU"})
    assert str(error) == (
        "no backend can run gla on cpu: hopper: needs compute capability 9.0; triton: needs an NVIDIA GPU"
    )


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


@pytest.mark.gpu
def test_the_present_gpu_has_every_number_that_plans_need():
    device = describe(torch.device("cuda"))
    assert device.name == torch.cuda.get_device_name()
    assert None not in [getattr(device, field) for field in device.__slots__]
