"""How many blocks of a launch run at once, and in how many waves."""

from dataclasses import dataclass

from .device import KIB, Device

# Hardware hands out registers in units of 256 a warp, warps in fours, and shared memory in units of 128 bytes; CUDA
# keeps 1 KiB of shared memory a block for itself. Source: the calculator in NVIDIA's Nsight Compute.
REGISTER_UNIT = 256
WARPS_UNIT = 4
SHARED_UNIT = 128
RESERVED_SHARED = KIB


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class Grid:
    """A launch: blocks, threads a block, 32-bit registers a thread, bytes of shared memory a block.

    registers: an upper bound where a kernel's own number is not known, since it decides only how many blocks share an
    SM. Where warps have different numbers, their mean.
    """

    blocks: int
    threads: int
    registers: int = 0
    shared: int = 0

    def fits(self, device: Device) -> bool:
        """Whether one block can run at all."""
        return self.per_sm(device) > 0

    def per_sm(self, device: Device) -> int:
        """Blocks that an SM holds at once; 0 where not even one fits. Raises ValueError where limits are not known."""
        if (
            device.threads_per_sm is None
            or device.threads_per_block is None
            or device.shared_per_sm is None
            or device.shared_per_block is None
            or device.registers_per_sm is None
            or device.registers_per_thread is None
        ):
            raise ValueError(f"device: expected one whose limits are known; got {device.name!r}")
        if self.threads > device.threads_per_block or self.shared > device.shared_per_block:
            return 0
        if self.registers > device.registers_per_thread:
            return 0
        warps = -(-self.threads // 32)
        held = [device.threads_per_sm // (32 * warps), device.blocks_per_sm or 32]
        if self.registers:
            alive = device.registers_per_sm // rounded_up(32 * self.registers, REGISTER_UNIT)
            held.append(alive // WARPS_UNIT * WARPS_UNIT // warps)
        held.append(device.shared_per_sm // rounded_up(self.shared + RESERVED_SHARED, SHARED_UNIT))
        return min(held)

    def at_once(self, device: Device) -> int:
        """Blocks that the whole device holds at once."""
        return self.per_sm(device) * device.processors

    def waves(self, device: Device) -> int:
        """How often the device is filled with blocks. Raises ValueError where no block fits."""
        return sum(count for count, _ in self.wave_sizes(device))

    def wave_sizes(self, device: Device) -> list[tuple[int, int]]:
        """(how many waves, blocks in each): the full ones, then the rest."""
        together = self.at_once(device)
        if not together:
            raise ValueError(f"grid: expected blocks that fit {device.name}; got {self}")
        full, rest = divmod(self.blocks, together)
        sizes = [(full, together)] if full else []
        return [*sizes, (1, rest)] if rest else sizes
