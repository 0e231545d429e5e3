"""Which rows the suite comes to, and how each is measured."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..failure import one_line
from ..measure import lost
from .check import Checked, check
from .decoding import decoding_rows, measure_decoding
from .host import host_rows, measure_host
from .layers import layer_rows, measure_layer
from .mixers import Mixer
from .row import Row
from .scale import Scale
from .training import measure_training, training_rows

# In the order in which they are measured.
PARTS = ("training", "layers", "host", "decoding", "longer")

_ALONE: dict[str, Callable[[Mixer, Row, Scale, torch.device], Row]] = {
    "layers": measure_layer,
    "host": measure_host,
    "decoding": measure_decoding,
}


def rows_of(part: str, mixer: Mixer, scale: Scale, device: torch.device) -> list[Row]:
    """The rows to come of one mixer in one part."""
    if part == "layers":
        return layer_rows(mixer, scale)
    if part == "host":
        return host_rows(mixer, scale)
    if part == "decoding":
        return decoding_rows(mixer, scale, device)
    return training_rows(mixer, scale, "training" if part == "training" else "longer")


class Suite:
    """Measures rows of mixers that were found right; a mixer is checked once."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale, self.device = scale, device
        self._checked: dict[str, Checked | Row] = {}

    def measure(self, mixer: Mixer, rows: list[Row]) -> Iterator[Row]:
        """The rows, all of one part and mixer, each with figures or with what stands against them.

        What a row raises is in the row. Where the device's context is lost, the rows end with the one that says so.
        """
        checked = self._check(mixer, rows[0])
        if isinstance(checked, Row):
            yield from (replace(row, status=checked.status, detail=checked.detail) for row in rows)
            return
        rows = [replace(row, error=checked.error, limit=checked.limit) for row in rows]
        if checked.wrong:
            yield from (replace(row, status="wrong", detail=checked.wrong) for row in rows)
            return
        for group in _groups(rows):
            yield from self._group(mixer, group)

    def _group(self, mixer: Mixer, rows: list[Row]) -> Iterator[Row]:
        left, failed = list(rows), ""
        try:
            if rows[0].part in _ALONE:
                found: Iterator[Row] = (_ALONE[row.part](mixer, row, self.scale, self.device) for row in rows)
            else:
                found = measure_training(mixer, rows, self.scale, self.device)
            for row in found:
                left.pop(0)
                yield row
        except Exception as error:  # whatever is raised is a result, and the others are still to be measured
            failed = one_line(error)
        # what the error's frames held is free by now
        gc.collect()
        yield from (replace(row, status="failed", detail=failed) for row in left)

    def _check(self, mixer: Mixer, row: Row) -> Checked | Row:
        if mixer.name not in self._checked:
            try:
                self._checked[mixer.name] = check(mixer, self.scale, self.device)
            except ImportError as error:
                self._checked[mixer.name] = replace(row, status="missing", detail=one_line(error))
            except Exception as error:
                self._checked[mixer.name] = replace(row, status="failed", detail=one_line(error))
        return self._checked[mixer.name]


def _groups(rows: list[Row]) -> Iterator[list[Row]]:
    """Eager and compiled training at one length belong together, since their losses are compared."""
    together: dict[object, list[Row]] = {}
    for row in rows:
        key = row.sizes["T"] if row.part in ("training", "longer") else row.key
        together.setdefault(key, []).append(row)
    yield from together.values()


def lost_after(row: Row, device: torch.device) -> str:
    """Frees what the row took; in words, why nothing runs on the device any more in this process, or ""."""
    return lost(device) if row.status in ("ok", "wrong", "failed") else ""
