"""How many blocks of a launch run at once, and in how many waves."""

from dataclasses import dataclass
from typing import NamedTuple

from .device import KIB, Device

# Hardware hands out registers in units of 256 a warp, warps in fours, and shared memory in units of 128 bytes; CUDA
# keeps 1 KiB of shared memory a block for itself. Source: the calculator in NVIDIA's Nsight Compute.
REGISTER_UNIT = 256
WARPS_UNIT = 4
SHARED_UNIT = 128
RESERVED_SHARED = KIB


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Limits(NamedTuple):
    """Of a device whose limits are known, in the order in which `Device` has them."""

    registers_sm: int
    registers_thread: int
    shared_sm: int
    shared_block: int
    threads_block: int
    threads_sm: int

    @staticmethod
    def of(device: Device) -> "Limits":
        """Raises ValueError where they are not known."""
        known = (device.registers_per_sm, device.registers_per_thread, device.shared_per_sm, device.shared_per_block)
        known += (device.threads_per_block, device.threads_per_sm)
        if None in known:
            raise ValueError(f"device: expected one whose limits are known; got {device.name!r}")
        return Limits(*known)  # type: ignore[arg-type]


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
        limits = Limits.of(device)
        if self.threads > limits.threads_block or self.shared > limits.shared_block:
            return 0
        if self.registers > limits.registers_thread:
            return 0
        warps = -(-self.threads // 32)
        held = [limits.threads_sm // (32 * warps), device.blocks_per_sm or 32]
        if self.registers:
            alive = limits.registers_sm // rounded_up(32 * self.registers, REGISTER_UNIT)
            held.append(alive // WARPS_UNIT * WARPS_UNIT // warps)
        held.append(limits.shared_sm // rounded_up(self.shared + RESERVED_SHARED, SHARED_UNIT))
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
