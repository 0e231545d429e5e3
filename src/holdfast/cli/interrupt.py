"""Ctrl-C that waits for the end of a step, so that what is saved is whole."""

import signal
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While active, the first SIGINT or SIGTERM is only noted; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or 0)
