"""What the planner knows of the machine a call runs on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A processor, described by plain numbers.

    kind is torch's device type ("cpu", "cuda", "mps", ...); name is what people call the processor.
    capability is CUDA's compute capability, (9, 0) on Hopper, and None off CUDA.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None

    @staticmethod
    def named(name: str) -> "Device":
        """The device of that name, so that a call can be planned where no such device is.

        Raises ValueError for a name that is not known.
        """
        try:
            return _NAMED[name.lower()]
        except KeyError:
            raise ValueError(f"device: expected one of {', '.join(sorted(_NAMED))}; got {name!r}") from None


_NAMED = {
    "cpu": Device("cpu", "cpu"),
    "h200": Device("cuda", "h200", (9, 0)),
    "h100": Device("cuda", "h100", (9, 0)),
    "a100": Device("cuda", "a100", (8, 0)),
    "a40": Device("cuda", "a40", (8, 6)),
    "rtx4090": Device("cuda", "rtx4090", (8, 9)),
    "rtx3090": Device("cuda", "rtx3090", (8, 6)),
}
