"""How many blocks of a launch run at once, and in how many waves."""

from dataclasses import dataclass
from functools import lru_cache

from .device import KIB, Device

# Hardware hands out registers in units of 256 a warp, warps in fours, and shared memory in units of 128 bytes; CUDA
# keeps 1 KiB of shared memory a block for itself. Source: the calculator in NVIDIA's Nsight Compute.
REGISTER_UNIT = 256
WARPS_UNIT = 4
SHARED_UNIT = 128
RESERVED_SHARED = KIB


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# a plan's grids differ in few of these, and each is asked for several times
@lru_cache(4096)
def _held(
    threads: int,
    registers: int,
    shared: int,
    most_threads: int,
    most_blocks: int,
    most_registers: int,
    most_shared: int,
) -> int:
    """Blocks that an SM with these limits holds."""
    warps = -(-threads // 32)
    held = [most_threads // (32 * warps), most_blocks]
    if registers:
        alive = most_registers // rounded_up(32 * registers, REGISTER_UNIT)
        held.append(alive // WARPS_UNIT * WARPS_UNIT // warps)
    held.append(most_shared // rounded_up(shared + RESERVED_SHARED, SHARED_UNIT))
    return min(held)


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
        if device.threads_per_sm is None or device.shared_per_sm is None or device.registers_per_sm is None:
            raise ValueError(f"device: expected one whose limits are known; got {device.name!r}")
        if self.threads > (device.threads_per_block or 0) or self.shared > (device.shared_per_block or 0):
            return 0
        if self.registers > (device.registers_per_thread or 0):
            return 0
        limits = device.threads_per_sm, device.blocks_per_sm or 32, device.registers_per_sm, device.shared_per_sm
        return _held(self.threads, self.registers, self.shared, *limits)

    def at_once(self, device: Device) -> int:
        """Blocks that the whole device holds at once."""
        return self.per_sm(device) * (device.sms or 0)

    def waves(self, device: Device) -> int:
        """How often the device is filled with blocks. Raises ValueError where no block fits."""
        if not self.fits(device):
            raise ValueError(f"grid: expected blocks that fit {device.name}; got {self}")
        return -(-self.blocks // self.at_once(device))

    def wave_sizes(self, device: Device) -> list[tuple[int, int]]:
        """(how many waves, blocks in each): the full ones, then the rest."""
        if not self.fits(device):
            raise ValueError(f"grid: expected blocks that fit {device.name}; got {self}")
        full, rest = divmod(self.blocks, self.at_once(device))
        sizes = [(full, self.at_once(device))] if full else []
        return [*sizes, (1, rest)] if rest else sizes
