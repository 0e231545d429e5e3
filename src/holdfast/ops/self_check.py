"""Whether doctor's checks would notice a wrong number: faults planted in what kernels write, one element at a time.

A check runs once as it is, and each tensor that a kernel writes is noted. Then it runs again for each of these, with
one element changed behind the launch: negated, as by a wrong sign or operand. On a CPU, where none of these kernels
runs, elements of what the two passes of a backend return are changed instead.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.kernels.common.backend import Backend, Rejected
from holdfast.kernels.common.watching import WATCHERS

from .checks import Attempt, Check, every, further

# elements of one tensor that are tried until one makes a difference: padding may be written, and read by nobody
_TRIES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault. kernel: that wrote the tensor; or the pass of a backend, where nothing was launched. tensor:
    which of its tensors.

    status: "caught"; "missed", where results differ and pass for right; "unread", where no bit of any result differs;
    "wrong" without a fault, and kernel then says how.
    """

    op: str
    backend: str
    kernel: str
    tensor: int
    launched: bool
    status: Literal["caught", "missed", "unread", "wrong"]


def self_check(device: torch.device, seed: int = 0) -> Iterator[Fault]:
    """A fault in each tensor that each kernel writes, in every check of doctor's that runs on the device, and in others
    that reach the rest of the kernels.

    A check that fails without a fault gets one of status "wrong". PyTorch's settings are what they were when the
    iterator is at its end or closed.
    """
    with _poisoned():
        for check in chain(every(device, seed), further(device, seed)):
            for attempt, run in check.tries:
                watch = _Watch(passes=device.type == "cpu")
                try:
                    with watch.on(check.backend):
                        results = attempt.results(run)
                    wrong = attempt.judge(results)[1]
                except Rejected:
                    continue
                except Exception as failure:  # whatever a backend raises is what has to be reported
                    wrong = f"{type(failure).__name__}: {failure}".splitlines()[0]
                if wrong:
                    yield Fault(check.op, check.backend.name, wrong, -1, False, "wrong")
                    break
                draw = torch.Generator().manual_seed(seed)
                yield from (_plant(check, attempt, run, place, results, draw) for place in watch.sites)
                break


@dataclass(frozen=True, slots=True)
class _Site:
    """A tensor that is written: of those that a launch takes, by their numbers; launch is -1 for a backend's pass."""

    launch: int
    kernel: str
    tensor: int


def _plant(
    check: Check, attempt: Attempt, run: Callable[[Any], Any], site: _Site, clean: list[Tensor], draw: torch.Generator
) -> Fault:
    status: Literal["caught", "missed", "unread"] = "unread"
    for _ in range(_TRIES):
        try:
            with _Watch(site.launch < 0, site, draw).on(check.backend):
                results = attempt.results(run)
        except Exception:  # what raises does not pass for right
            status = "caught"
            break
        if not all(torch.equal(x, y) for x, y in zip(results, clean, strict=True)):
            status = "caught" if attempt.judge(results)[1] else "missed"
            break
    return Fault(check.op, check.backend.name, site.kernel, site.tensor, site.launch >= 0, status)


class _Watch:
    """Watches one run: launches, or with passes what the backend's passes return. Without a fault sites are noted;
    draw chooses the element."""

    def __init__(self, passes: bool, fault: _Site | None = None, draw: torch.Generator | None = None) -> None:
        self.passes, self.fault, self.draw = passes, fault, draw
        self.launches = 0
        self.sites: list[_Site] = []

    @contextmanager
    def on(self, backend: Backend) -> Iterator[None]:
        if self.passes:
            with _returning(backend, self._returned):
                yield
            return
        WATCHERS.append(self._launched)
        try:
            yield
        finally:
            WATCHERS.remove(self._launched)

    def _launched(self, kernel: str, tensors: list[Tensor], start: Callable[[], None]) -> None:
        number, self.launches = self.launches, self.launches + 1
        if self.fault is not None and (self.fault.launch, self.fault.kernel) != (number, kernel):
            start()
            return
        before = [x.clone() for x in tensors]
        start()
        for n, (x, y) in enumerate(zip(tensors, before, strict=True)):
            if self.fault is None and _written(x, y).any():
                self.sites.append(_Site(number, kernel, n))
            elif self.fault is not None and self.fault.tensor == n:
                self._spoil(x, _written(x, y))

    def _returned(self, way: str, found: Iterable[Any]) -> None:
        for n, x in enumerate(found):
            if not (isinstance(x, Tensor) and x.is_floating_point() and x.numel()):
                continue
            if self.fault is None:
                self.sites.append(_Site(-1, way, n))
            elif self.fault == _Site(-1, way, n):
                self._spoil(x, torch.ones_like(x, dtype=torch.bool))

    def _spoil(self, x: Tensor, written: Tensor) -> None:
        """Changes one of the written elements, of those that are at least half as large as they usually are."""
        sizes = x.detach().double().abs().masked_fill(~(written & x.isfinite()), 0)
        typical = sizes.square().sum().div((sizes > 0).sum().clamp(min=1)).sqrt()
        places = ((sizes >= typical / 2) & written).nonzero()
        if not len(places):
            return
        at = tuple(places[int(torch.randint(len(places), (), generator=self.draw))].tolist())
        with torch.no_grad():
            x[at] = -x[at] if x[at] != 0 else 1.0


def _written(x: Tensor, before: Tensor) -> Tensor:
    """Which elements hold other bits than before; none of a tensor of integers, which may be offsets and flags."""
    if not x.is_floating_point():
        return torch.zeros_like(x, dtype=torch.bool)
    bits = _INTEGERS[x.element_size()]
    return x.detach().contiguous().view(bits) != before.contiguous().view(bits)


@contextmanager
def _returning(backend: Backend, returned: Callable[[str, Iterable[Any]], None]) -> Iterator[None]:
    """Tells of what each pass of the backend returns, before anybody reads it."""

    def passing(way: str) -> Callable[..., Any]:
        run = getattr(backend, way)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            found = run(*arguments, **named)
            flat = found if isinstance(found, tuple) else (found,)
            returned(way, [y for x in flat for y in (x if isinstance(x, list) else [x])])
            return found

        return wrapped

    instead = {way: passing(way) for way in ("forward", "backward")}
    own = {way: vars(backend)[way] for way in instead if way in vars(backend)}
    vars(backend).update(instead)
    try:
        yield
    finally:
        for way in instead:
            del vars(backend)[way]
        vars(backend).update(own)


@contextmanager
def _poisoned() -> Iterator[None]:
    """Memory that nothing wrote holds NaN, so that what a kernel writes differs from it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # of operations that PyTorch has in no such form, which matters here to none
            warnings.filterwarnings("ignore", "(?s).*(deterministic implementation|CUBLAS_WORKSPACE_CONFIG)")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
