"""How fast a training goes, and how much of the device it uses."""

import statistics

import torch

GIB = 2**30


class Throughput:
    """Of the steps that were added, but for a process's first one, which compiles kernels.

    tokens: of a step, all processes together. flops: of a token. peak: FLOPs a second of all devices together, None
    where it is not known.
    """

    def __init__(self, tokens: int, flops: int, peak: float | None, device: torch.device) -> None:
        self.tokens = tokens
        self.flops = flops
        self.peak = peak
        self.device = device
        self._seconds: list[float] = []
        self._spent = 0.0

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._spent = seconds if len(self._seconds) <= 2 else self._spent + seconds

    @property
    def tokens_per_second(self) -> float:
        return max(1, len(self._seconds) - 1) * self.tokens / self._spent

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs a second over the peak."""
        return None if self.peak is None else self.tokens_per_second * self.flops / self.peak

    @property
    def memory(self) -> int | None:
        """The most bytes that tensors of this process have taken on its GPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def scalars(self) -> dict[str, float]:
        """What is known, by name."""
        found = {"tokens_per_second": self.tokens_per_second, "mfu": self.utilisation, "memory_bytes": self.memory}
        return {name: value for name, value in found.items() if value is not None}

    def said(self) -> str:
        parts = [f"{self.tokens_per_second:,.0f} tokens/s"]
        if self.utilisation is not None:
            parts.append(f"{self.utilisation:.1%} MFU")
        if self.memory is not None:
            parts.append(f"{self.memory / GIB:.2f} GiB")
        return "  ".join(parts)

    def summary(self) -> str:
        """Empty before there is a step."""
        if not self._seconds:
            return ""
        return f"median step {statistics.median(self._seconds[1:] or self._seconds):.3f} s  {self.said()}"
