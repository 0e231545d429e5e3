"""Predicted times and the table of devices."""

import pytest

from holdfast.planner import Device
from holdfast.planner.movement import Prediction

GPUS = ("h200", "h100", "a100", "a40", "rtx4090", "rtx3090")


def test_what_overlaps_counts_once_and_latencies_add() -> None:
    device = Device.named("h200")
    found = Prediction.of(
        device, moved=4.8e9, operations=98.9e9, launches=2, launch_latency=3e-6, exchanges=10, exchange_latency=1e-6
    )
    assert found.memory == pytest.approx(1e-3)
    assert found.arithmetic == pytest.approx(1e-4)
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(1e-3 + 6e-6 + 10e-6)
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
    assert 1.2e9 < device.fp32_rate / (device.sms * lanes * 2) < 2.7e9
    assert device.tensor_rate > device.fp32_rate
    assert device.shared_per_block == device.shared_per_sm - 1024
    assert (device.max_cluster > 1) == (device.capability >= (9, 0))


def test_devices_without_facts_still_work() -> None:
    assert Device("cuda", "some GPU", (8, 0)).sms is None
    assert Device.named("cpu") == Device("cpu", "cpu")
    with pytest.raises(ValueError, match="device: expected one of a100, a40, cpu"):
        Device.named("h300")
