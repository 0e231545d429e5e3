"""How long a launch should take."""

from dataclasses import dataclass

from ..device import Device
from ..occupancy import Grid


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. The memory, the arithmetic and the longest chain of dependent steps overlap; latencies come on top.

    memory: bytes / bandwidth. arithmetic: operations / rate. serial: the chain of steps that must follow one another.
    launch: of all launches. exchange: of all waits of blocks for one another. apart: what launches that follow one
    another lose because one's memory traffic does not overlap with the other's arithmetic.
    """

    memory: float
    arithmetic: float
    serial: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    apart: float = 0.0

    @staticmethod
    def of(
        device: Device,
        moved: float,
        operations: float,
        grid: Grid | None = None,
        tensor_cores: bool = True,
        serial: float = 0.0,
        launches: int = 1,
        launch_latency: float = 2e-6,
        exchanges: int = 0,
        exchange_latency: float = 1.7e-6,
    ) -> "Prediction":
        """From bytes moved and operations, at the rates that device reaches.

        grid: its blocks share bytes, operations equally; with it a wave that leaves SMs idle takes as long as its SMs
        need. serial: seconds of one block's chain; waves follow one another. latencies: seconds each; an exchange of
        all blocks through L2 took 1.7 us on an H200. Raises ValueError for a device whose rates are not known, and for
        a grid of blocks that do not fit it.
        """
        bandwidth, rate = device.reached_bandwidth, device.reached_tensor_rate if tensor_cores else device.fp32_rate
        if bandwidth is None or rate is None:
            raise ValueError(f"device: expected one whose bandwidth and rates are known; got {device.name!r}")
        memory, arithmetic = moved / bandwidth, operations / rate
        if grid is not None and grid.blocks:
            assert device.sms is not None
            assert device.sm_bandwidth is not None
            memory = arithmetic = 0.0
            sizes = grid.wave_sizes(device)
            for count, blocks in sizes:
                share = blocks / grid.blocks
                busiest = -(-blocks // device.sms) / grid.blocks
                memory += count * max(moved * share / bandwidth, moved * busiest / device.sm_bandwidth)
                arithmetic += count * operations * busiest / (rate / device.sms)
            serial *= sum(count for count, _ in sizes)
        return Prediction(memory, arithmetic, serial, launches * launch_latency, exchanges * exchange_latency)

    def then(self, after: "Prediction") -> "Prediction":
        """Of this launch and one that waits for its end: seconds add."""
        memory, arithmetic = self.memory + after.memory, self.arithmetic + after.arithmetic
        serial, launch = self.serial + after.serial, self.launch + after.launch
        exchange = self.exchange + after.exchange
        side_by_side = max(memory, arithmetic, serial) + launch + exchange
        # sums of floats leave a last bit of either sign where nothing is lost
        apart = round(self.seconds + after.seconds - side_by_side, 15)
        return Prediction(memory, arithmetic, serial, launch, exchange, apart)

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic, self.serial) + self.launch + self.exchange + self.apart

    @property
    def bound(self) -> str:
        """What takes longest of what overlaps: "memory", "arithmetic" or "serial"."""
        return max(("memory", "arithmetic", "serial"), key=lambda name: getattr(self, name))
