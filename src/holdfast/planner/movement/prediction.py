"""How long a launch should take."""

from dataclasses import dataclass

from ..device import Device


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. The memory, the arithmetic and the longest chain of dependent steps overlap; latencies come on top.

    memory: bytes / bandwidth. arithmetic: operations / rate. serial: the chain of steps that must follow one another.
    launch: of all launches. exchange: of all waits of blocks for one another.
    """

    memory: float
    arithmetic: float
    serial: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0

    @staticmethod
    def of(
        device: Device,
        moved: float,
        operations: float,
        tensor_cores: bool = True,
        serial: float = 0.0,
        launches: int = 1,
        launch_latency: float = 2e-6,
        exchanges: int = 0,
        exchange_latency: float = 1.7e-6,
    ) -> "Prediction":
        """From bytes moved and operations. latencies: seconds each; an exchange of all blocks through L2 took 1.7 us on
        an H200. Raises ValueError for a device whose rates are not known.
        """
        rate = device.tensor_rate if tensor_cores else device.fp32_rate
        if device.bandwidth is None or rate is None:
            raise ValueError(f"device: expected one whose bandwidth and rates are known; got {device.name!r}")
        return Prediction(
            memory=moved / device.bandwidth,
            arithmetic=operations / rate,
            serial=serial,
            launch=launches * launch_latency,
            exchange=exchanges * exchange_latency,
        )

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic, self.serial) + self.launch + self.exchange

    @property
    def bound(self) -> str:
        """What takes longest of what overlaps: "memory", "arithmetic" or "serial"."""
        return max(("memory", "arithmetic", "serial"), key=lambda name: getattr(self, name))
