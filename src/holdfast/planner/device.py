"""What the planner knows of the machine a call runs on."""

from dataclasses import dataclass, replace

from .choices import no_choice

KIB = 1024
MIB = 1024 * KIB

# Of what vendors state, what an H200 reached: a copy 4.27 of 4.8 TB/s, a bf16 product of 8192^3 750 of 989 TFLOP/s. The
# other devices are taken to be alike.
COPY_REACHES = 0.89
PRODUCT_REACHES = 0.76
# What one SM alone pulls from memory. Its port to the L2 cache is 64 bytes wide.
BYTES_A_CLOCK = 40


@dataclass(frozen=True, slots=True)
class Device:
    """A processor, described by plain numbers; a number that is not known is None.

    kind is torch's device type ("cpu", "cuda", "mps", ...); name is what people call the processor.
    capability is CUDA's compute capability, (9, 0) on Hopper, and None off CUDA.
    sms: streaming multiprocessors.
    registers_per_sm, registers_per_block, registers_per_thread: of 32 bits.
    shared_per_sm, shared_per_block: bytes of shared memory; a block's is what it can opt into.
    threads_per_block, threads_per_sm, blocks_per_sm: at most so many.
    l2_bytes: bytes of the last cache before memory.
    bandwidth: bytes a second of device memory, as the vendor states it.
    tensor_rate: bf16 operations a second of the tensor cores, dense, accumulated in float32; a multiply-add is two.
    fp32_rate: float32 operations a second outside of them.
    max_cluster: blocks that can share a cluster, 1 where there are none; more than 8 are not portable.
    clock: cycles a second, boosted.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    sms: int | None = None
    registers_per_sm: int | None = None
    registers_per_block: int | None = None
    registers_per_thread: int | None = None
    shared_per_sm: int | None = None
    shared_per_block: int | None = None
    threads_per_block: int | None = None
    threads_per_sm: int | None = None
    l2_bytes: int | None = None
    bandwidth: float | None = None
    tensor_rate: float | None = None
    fp32_rate: float | None = None
    max_cluster: int | None = None
    blocks_per_sm: int | None = None
    clock: float | None = None

    @property
    def processors(self) -> int:
        """sms, as models of a GPU's kernels divide by it; 1 where it is not known."""
        return self.sms or 1

    @property
    def block_memory(self) -> int:
        """Bytes of shared memory that a block may have; none where that is not known."""
        return self.shared_per_block or 0

    @property
    def reached_bandwidth(self) -> float | None:
        """Bytes a second that a copy reaches, reads and writes; predictions use it."""
        return None if self.bandwidth is None else COPY_REACHES * self.bandwidth

    @property
    def reached_tensor_rate(self) -> float | None:
        """Operations a second that a large matrix product reaches; predictions use it."""
        return None if self.tensor_rate is None else PRODUCT_REACHES * self.tensor_rate

    @property
    def sm_bandwidth(self) -> float | None:
        """Bytes a second that one SM alone can pull, which bounds launches of few blocks."""
        return None if self.clock is None else BYTES_A_CLOCK * self.clock

    @staticmethod
    def named(name: str) -> "Device":
        """The device of that name, so that a call can be planned where no such device is.

        Raises ValueError for a name that is not known.
        """
        try:
            return _NAMED[name.lower()]
        except KeyError:
            raise ValueError(no_choice("device", sorted(_NAMED), name)) from None

    @staticmethod
    def recognised(name: str) -> "Device | None":
        """The known device that a driver's name such as "NVIDIA H200" speaks of, or None."""
        plain = name.lower().replace(" ", "")
        return next((device for key, device in _NAMED.items() if device.kind == "cuda" and key in plain), None)

    @staticmethod
    def like(name: str, capability: tuple[int, int], sms: int) -> "Device":
        """A GPU as its driver describes it, at the rates of the known one of that name.

        One that is not in the table is taken to be like the known one of the closest compute capability. Rates and
        bandwidth are that one's times the ratio of their SMs, so that a slice of a GPU counts as one, and plans for
        others compare sensibly; predicted seconds are a guess there.
        """
        known = [device for device in _NAMED.values() if device.kind == "cuda"]
        nearest = Device.recognised(name) or min(known, key=lambda device: _distance(device, capability, sms))
        scale = sms / nearest.processors
        rates = {rate: scale * getattr(nearest, rate) for rate in ("bandwidth", "tensor_rate", "fp32_rate")}
        return replace(nearest, name=name, capability=capability, sms=sms, **rates)


def _distance(device: Device, capability: tuple[int, int], sms: int) -> tuple[int, int]:
    assert device.capability is not None
    assert device.sms is not None
    return abs(10 * (device.capability[0] - capability[0]) + device.capability[1] - capability[1]), abs(
        device.sms - sms
    )


def _gpu(
    name: str,
    capability: tuple[int, int],
    sms: int,
    shared_per_sm: int,
    threads_per_sm: int,
    l2_bytes: int,
    bandwidth: float,
    tensor_rate: float,
    fp32_rate: float,
    blocks_per_sm: int,
    clock: float,
) -> Device:
    """What differs between NVIDIA's GPUs; the rest has been the same since compute capability 8.0."""
    return Device(
        kind="cuda",
        name=name,
        capability=capability,
        sms=sms,
        registers_per_sm=65536,
        registers_per_block=65536,
        registers_per_thread=255,
        shared_per_sm=shared_per_sm,
        # CUDA keeps 1 KiB a block for itself.
        shared_per_block=shared_per_sm - KIB,
        threads_per_block=1024,
        threads_per_sm=threads_per_sm,
        l2_bytes=l2_bytes,
        bandwidth=bandwidth,
        tensor_rate=tensor_rate,
        fp32_rate=fp32_rate,
        max_cluster=16 if capability >= (9, 0) else 1,
        blocks_per_sm=blocks_per_sm,
        clock=clock,
    )


# Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". Rates, SMs and caches:
# NVIDIA's data sheets of H200, H100 and A100 (SXM, 80 GB) and A40, and the architecture white papers of Hopper (H100),
# Ampere (A100; GA102 for the RTX 3090 and A40) and Ada (RTX 4090). Rates are dense, at boost clock. The H200's cache
# is what its driver reports.
_NAMED = {
    "cpu": Device("cpu", "cpu"),
    "h200": _gpu("h200", (9, 0), 132, 228 * KIB, 2048, 60 * MIB, 4.8e12, 989e12, 67e12, 32, 1.98e9),
    "h100": _gpu("h100", (9, 0), 132, 228 * KIB, 2048, 50 * MIB, 3.35e12, 989e12, 67e12, 32, 1.98e9),
    "a100": _gpu("a100", (8, 0), 108, 164 * KIB, 2048, 40 * MIB, 2.039e12, 312e12, 19.5e12, 32, 1.41e9),
    "a40": _gpu("a40", (8, 6), 84, 100 * KIB, 1536, 6 * MIB, 696e9, 149.7e12, 37.4e12, 16, 1.74e9),
    "rtx4090": _gpu("rtx4090", (8, 9), 128, 100 * KIB, 1536, 72 * MIB, 1008e9, 165.2e12, 82.6e12, 24, 2.52e9),
    "rtx3090": _gpu("rtx3090", (8, 6), 82, 100 * KIB, 1536, 6 * MIB, 936e9, 71e12, 35.6e12, 16, 1.695e9),
}
