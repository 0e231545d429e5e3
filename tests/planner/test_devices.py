"""What is known of each device, beside what its vendor states."""

import pytest

from holdfast.planner import Device
from holdfast.planner.device import _NAMED

GPUS = sorted(name for name, device in _NAMED.items() if device.kind == "cuda")
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": KiB of shared memory an SM and a block,
# threads and blocks an SM; registers are 64 K an SM and a block, 255 a thread, threads 1,024 a block, in all of them
BY_CAPABILITY = {
    (8, 0): (164, 163, 2048, 32),
    (8, 6): (100, 99, 1536, 16),
    (8, 9): (100, 99, 1536, 24),
    (9, 0): (228, 227, 2048, 32),
}


@pytest.mark.parametrize("name", GPUS)
def test_limits_are_those_of_the_compute_capability(name):
    device = Device.named(name)
    shared, block, threads, blocks = BY_CAPABILITY[device.capability]
    assert (device.shared_per_sm, device.shared_per_block) == (shared * 1024, block * 1024)
    assert (device.threads_per_sm, device.blocks_per_sm, device.threads_per_block) == (threads, blocks, 1024)
    assert (device.registers_per_sm, device.registers_per_block, device.registers_per_thread) == (65536, 65536, 255)
    assert device.max_cluster == (16 if device.capability == (9, 0) else 1)
    assert device.name == name


@pytest.mark.parametrize("name", GPUS)
def test_rates_follow_from_the_data_sheets_units(name):
    """float32: so many multiply-adds an SM and clock. bf16 of the tensor cores: dense, with float32 accumulators."""
    device = Device.named(name)
    lanes = {(8, 0): 64}.get(device.capability, 128)
    assert device.fp32_rate == pytest.approx(2 * lanes * device.sms * device.clock, rel=0.02)
    # per SM and clock; GA102 and AD102 in GeForce boards run float32 accumulation at half rate, the A40 does not
    tensor = {"a100": 2048, "a40": 1024, "h100": 4096, "h200": 4096, "rtx3090": 512, "rtx4090": 512}[name]
    assert device.tensor_rate == pytest.approx(tensor * device.sms * device.clock, rel=0.08)


def test_memory_and_caches_as_the_data_sheets_say():
    stated = {
        "h200": (132, 4.8e12, 60), "h100": (132, 3.35e12, 50), "a100": (108, 2.039e12, 40), "a40": (84, 0.696e12, 6),
        "rtx4090": (128, 1.008e12, 72), "rtx3090": (82, 0.936e12, 6),
    }  # fmt: skip
    found = {name: Device.named(name) for name in GPUS}
    assert {name: (each.sms, each.bandwidth, each.l2_bytes / 2**20) for name, each in found.items()} == stated


def test_predictions_use_what_an_h200_reached():
    """Of 4.8 TB/s a copy moved 4.27, of 989 TFLOP/s a product reached 750; one SM pulls 40 bytes a clock."""
    h200 = Device.named("H200")
    assert h200.reached_bandwidth == pytest.approx(4.27e12, rel=2e-3)
    assert h200.reached_tensor_rate == pytest.approx(750e12, rel=3e-3)
    assert h200.sm_bandwidth == pytest.approx(40 * 1.98e9)
    cpu = Device.named("cpu")
    assert (cpu.kind, cpu.reached_bandwidth, cpu.reached_tensor_rate, cpu.sm_bandwidth) == ("cpu", None, None, None)


def test_a_slice_of_a_gpu_has_its_share():
    """NVIDIA H200 MIG 1g.18gb: 16 of 132 SMs."""
    part, whole = Device.like("NVIDIA H200 MIG 1g.18gb", (9, 0), 16), Device.named("h200")
    assert (part.name, part.sms, part.capability) == ("NVIDIA H200 MIG 1g.18gb", 16, (9, 0))
    for rate in ("bandwidth", "tensor_rate", "fp32_rate"):
        assert getattr(part, rate) == pytest.approx(getattr(whole, rate) * 16 / 132)
    assert part.shared_per_sm == whole.shared_per_sm


@pytest.mark.parametrize(
    ("capability", "sms", "nearest"),
    [((10, 0), 132, "h200"), ((8, 0), 108, "a100"), ((8, 7), 82, "rtx3090"), ((8, 6), 84, "a40"), ((7, 5), 70, "a100")],
)
def test_an_unknown_gpu_is_like_the_nearest(capability, sms, nearest):
    """By compute capability, then by SMs."""
    found, known = Device.like("some GPU", capability, sms), Device.named(nearest)
    assert (found.capability, found.sms) == (capability, sms)
    assert (found.l2_bytes, found.clock) == (known.l2_bytes, known.clock)
    assert found.bandwidth == pytest.approx(known.bandwidth * sms / known.sms)


def test_what_is_not_known_is_one_processor_without_memory():
    h200, unknown = Device.named("h200"), Device("cpu", "cpu")
    assert (h200.processors, h200.block_memory) == (132, 227 * 1024)
    assert (unknown.processors, unknown.block_memory) == (1, 0)
