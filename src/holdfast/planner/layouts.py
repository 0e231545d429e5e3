"""What the ranks that share a layer send one another, by the way in which they share it, and how long that makes it."""

from dataclasses import dataclass

from .device import Device

# What one GPU sends a second. NVIDIA's data sheets state NVLink in both directions together: 900 GB/s on H100 and H200,
# 600 on A100. InfiniBand NDR, one adapter a GPU, is 400 Gbit/s each way.
_NVLINK = {"h200": 450e9, "h100": 450e9, "a100": 300e9}
_INFINIBAND = 50e9
LINKS = ("nvlink", "ib")

# bytes of a weight and of its gradient: float32, also under autocast
WEIGHT = 4


@dataclass(frozen=True, slots=True)
class Link:
    """bandwidth: bytes a second that a GPU sends while it receives as many, as the vendor states it."""

    name: str
    bandwidth: float

    @staticmethod
    def between(name: str, device: Device) -> "Link":
        """Raises ValueError for a link that is not known, or not of that device."""
        if name not in LINKS:
            raise ValueError(f"link: expected one of {', '.join(LINKS)}; got {name!r}")
        if name == "ib":
            return Link(name, _INFINIBAND)
        if device.name not in _NVLINK:
            raise ValueError(f"link: expected 'ib' for {device.name}, as nvlink is known of {', '.join(_NVLINK)}")
        return Link(name, _NVLINK[device.name])


def gathered(whole: float, ranks: int) -> float:
    """Bytes that a rank sends until each has the whole that it had a part of, or has its part of a sum of wholes."""
    return whole * (ranks - 1) / ranks


def reduced(whole: float, ranks: int) -> float:
    """Bytes that a rank sends until each has the sum over the ranks: its parts are summed, then gathered."""
    return 2 * gathered(whole, ranks)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to share a layer. Of both passes and one rank: seconds of its own work, None where they are not known;
    waits: bytes that it sends and waits for; meanwhile: bytes that are sent while it works."""

    name: str
    share: str
    seconds: float | None
    waits: float = 0.0
    meanwhile: float = 0.0

    def on(self, link: Link) -> float | None:
        """Seconds of the layer: work and what it waits for, or all that is sent where that takes longer."""
        if self.seconds is None:
            return None
        return max(self.seconds + self.waits / link.bandwidth, (self.waits + self.meanwhile) / link.bandwidth)


def state_bytes(message: float, ranks: int) -> float:
    """Context parallelism: each rank's message of states goes to every other one, and its gradient comes back."""
    return 2 * gathered(ranks * message, ranks)


def activation_bytes(tokens: int, width: int, element: int, ranks: int) -> float:
    """Tensor parallelism: behind the mixer and behind the MLP the ranks sum up a token's channels, and backwards the
    gradients of what entered both."""
    return 4 * reduced(tokens * width * element, ranks)


def weight_bytes(weights: int, ranks: int) -> float:
    """FSDP: weights are gathered for each pass, and their gradients summed where they are kept."""
    return 3 * gathered(weights * WEIGHT, ranks)


def gradient_bytes(weights: int, ranks: int) -> float:
    """Ranks with the same weights and other tokens: DDP, and context parallelism."""
    return reduced(weights * WEIGHT, ranks)
