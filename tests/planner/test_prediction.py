"""Predicted times and the table of devices."""

from dataclasses import replace

import pytest

from holdfast.planner import Device
from holdfast.planner.movement import Prediction

GPUS = ("h200", "h100", "a100", "a40", "rtx4090", "rtx3090")


def test_what_overlaps_counts_once_and_latencies_add() -> None:
    device = Device.named("h200")
    found = Prediction.of(
        device, moved=4.8e9, operations=98.9e9, launches=2, launch_latency=3e-6, exchanges=10, exchange_latency=1e-6
    )
    assert found.memory == pytest.approx(1e-3 / 0.89)
    assert found.arithmetic == pytest.approx(1e-4 / 0.76)
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(1e-3 / 0.89 + 6e-6 + 10e-6)
    assert Prediction.of(device, 0, 98.9e9).bound == "arithmetic"
    assert Prediction.of(device, 4.8e9, 0, serial=2e-3).seconds == pytest.approx(2e-3 + 2e-6)
    assert Prediction.of(device, 0, 67e9, tensor_cores=False).arithmetic == pytest.approx(1e-3)


def test_a_device_without_rates_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="bandwidth and rates are known; got 'cpu'"):
        Prediction.of(Device.named("cpu"), 1, 1)


@pytest.mark.parametrize("name", GPUS)
def test_facts_of_gpus_fit_together(name: str) -> None:
    device = Device.named(name.upper())
    assert None not in [getattr(device, field) for field in device.__slots__]
    # The data sheet's float32 rate is SMs x lanes x 2 x clock: the clock that it implies is a GPU's.
    lanes = {(8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128}[device.capability]
    assert device.fp32_rate / (device.sms * lanes * 2) == pytest.approx(device.clock, rel=0.01)
    assert 1.2e9 < device.clock < 2.7e9
    assert device.reached_bandwidth / device.sms < device.sm_bandwidth < device.reached_bandwidth
    assert device.tensor_rate > device.fp32_rate
    assert device.shared_per_block == device.shared_per_sm - 1024
    assert (device.max_cluster > 1) == (device.capability >= (9, 0))


def test_devices_without_facts_still_work() -> None:
    assert Device("cuda", "some GPU", (8, 0)).sms is None
    assert Device.named("cpu") == Device("cpu", "cpu")
    with pytest.raises(ValueError, match="device: expected one of a100, a40, cpu"):
        Device.named("h300")


def test_a_gpu_out_of_the_table_is_taken_to_be_like_a_known_one() -> None:
    found = Device.like("NVIDIA L40S", (8, 9), 142)
    known = Device.named("rtx4090")
    assert (found.name, found.capability, found.sms) == ("NVIDIA L40S", (8, 9), 142)
    assert found.shared_per_block == known.shared_per_block
    assert found.bandwidth == pytest.approx(known.bandwidth * 142 / 128)
    assert Device.like("NVIDIA A30", (8, 0), 56).bandwidth == pytest.approx(Device.named("a100").bandwidth * 56 / 108)
    # a slice of a known one, as its driver names it
    part = Device.like("NVIDIA H200 MIG 1g.18gb", (9, 0), 16)
    assert (part.bandwidth, part.sms) == (pytest.approx(4.8e12 * 16 / 132), 16)
    assert Device.like("NVIDIA H200", (9, 0), 132) == replace(Device.named("h200"), name="NVIDIA H200")
    # of two with one capability, the one of about as many SMs
    assert Device.like("some H100", (9, 0), 114).tensor_rate == pytest.approx(989e12 * 114 / 132)
