"""Whether doctor's checks would notice a wrong number: faults planted in what kernels write, one element at a time.

A check runs once as it is, and each tensor that a kernel writes is noted. Then it runs again for each of these, with
one element changed behind the launch: negated, as by a wrong sign or operand. On a CPU, where none of these kernels
runs, elements of what a backend's passes return are changed instead.

Of a tensor that a check has written again and again, by a launch a step, a few launches are taken.

An element may be one that no result depends on: padding, or what is kept for a gradient that nobody asked for. So an
element is looked for that one does depend on, in the end by halves of all that was written; only where no result
differs with all of them changed is the tensor called unread, and what takes it is told.

What a kernel hands on to another is one of many terms of a result, of which half precision need not resolve each. Where
a result differs and passes for right, the element is changed further, and by how much it has to be is told.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.kernels.backend import Backend, Rejected
from holdfast.kernels.runtime.watching import WATCHERS

from .checks import Attempt, Check, every, further

# elements of one tensor that are tried, until half as many make a difference, before halves of all are
_TRIES = 8
# an element x becomes -x, or -4 x, and so on
_FACTORS = (1, 4, 16, 64)
# launches of one kernel that write a tensor and all get a fault; of more, these places among them
_EACH, _SOME = 4, (0.0, 0.5, 1.0)
# what a backend may have of them: two passes, or a step in place
_PASSES = ("forward", "backward", "run", "update", "update_normalized")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Status = Literal["caught", "missed", "unread", "wrong"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault. kernel: that wrote the tensor; or the pass of a backend, where nothing was launched. tensor:
    the kernel's name for it, or its number among what a pass returns or a CUDA kernel takes.

    status: "caught"; "missed", where results differ and pass for right; "unread", where no bit of any result differs;
    "wrong" without a fault, and kernel then says how. factor: by how many times its value the element had to change,
    beside its sign. reason: of an unread tensor, who takes it.
    """

    op: str
    backend: str
    kernel: str
    tensor: str
    launched: bool
    status: Status
    factor: int = 1
    reason: str = ""


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
                    if not watch.passes:
                        # what a first call launches to learn which kernels it lacks is no launch of a later call
                        attempt.results(run)
                    with watch.on(check.backend):
                        results = attempt.results(run)
                    wrong = attempt.judge(results)[1]
                except Rejected:
                    continue
                except Exception as failure:  # whatever a backend raises is what has to be reported
                    wrong = f"{type(failure).__name__}: {failure}".splitlines()[0]
                if wrong:
                    yield Fault(check.op, check.backend.name, wrong, "", False, "wrong")
                    break
                draw = torch.Generator().manual_seed(seed)
                for site in watch.chosen():
                    status, factor = _Planting(check, attempt, run, site, results, draw).found()
                    reason = watch.reason(site) if status == "unread" else ""
                    told = site.kernel, site.tensor, site.launch >= 0
                    yield Fault(check.op, check.backend.name, *told, status, factor, reason)
                break


def unnoticed(faults: Iterable[Fault]) -> list[Fault]:
    """Those of tensors in which no check catches a fault: what one does not show another does."""

    def tensor(fault: Fault) -> tuple[str, ...]:
        return (fault.kernel, fault.tensor, *(() if fault.launched else (fault.op, fault.backend)))

    every_fault = list(faults)
    caught = {tensor(fault) for fault in every_fault if fault.status == "caught"}
    return [fault for fault in every_fault if fault.status in ("missed", "unread") and tensor(fault) not in caught]


@dataclass(frozen=True, slots=True)
class _Site:
    """A tensor that is written: of those that a launch takes, by their names; launch is -1 for a backend's pass."""

    launch: int
    kernel: str
    tensor: str


@dataclass
class _Damage:
    """What is done to a site's tensor. chosen: which elements of so many that count become -factor times themselves."""

    site: _Site
    chosen: Callable[[int], Iterable[int]]
    factor: int = 1
    # how many there were
    count: int = 0

    def spoil(self, x: Tensor, written: Tensor) -> None:
        """Of the written elements those count that are at least half as large as they usually are."""
        sizes = x.detach().double().abs().masked_fill(~(written & x.isfinite()), 0)
        typical = sizes.square().sum().div((sizes > 0).sum().clamp(min=1)).sqrt()
        places = ((sizes >= typical / 2) & written).nonzero()
        self.count = len(places)
        if not self.count:
            return
        at = tuple(places[list(self.chosen(self.count))].unbind(1))
        with torch.no_grad():
            x[at] = torch.where(x[at] == 0, torch.ones_like(x[at]), -self.factor * x[at])


@dataclass
class _Planting:
    """Faults in one tensor, until one makes a difference that is judged."""

    check: Check
    attempt: Attempt
    run: Callable[[Any], Any]
    site: _Site
    clean: list[Tensor]
    draw: torch.Generator

    def found(self) -> tuple[Status, int]:
        """What comes of it, and by how many times its value the element was changed."""
        places = self._that_are_read()
        if not places:
            return "unread", 1
        for factor in _FACTORS:
            if any(self._results(_Damage(self.site, chosen, factor))[1] for chosen in places):
                return "caught", factor
        return "missed", _FACTORS[-1]

    def _that_are_read(self) -> list[Callable[[int], Iterable[int]]]:
        """Some elements that results depend on, or as few as there are together that they do; none if there are none.

        An element that is caught as it is ends the search.
        """
        found: list[Callable[[int], Iterable[int]]] = []
        for _ in range(_TRIES):
            one = partial(_one_at, torch.rand((), generator=self.draw, dtype=torch.float32).item())
            differs, wrong = self._results(_Damage(self.site, one))
            if wrong:
                return [one]
            if differs:
                found.append(one)
            if 2 * len(found) >= _TRIES:
                break
        return found or self._by_halves()

    def _by_halves(self) -> list[Callable[[int], Iterable[int]]]:
        every = _Damage(self.site, range)
        if not self._results(every)[0]:
            return []
        first, last = 0, every.count
        while last - first > 1:
            middle = (first + last) // 2
            if self._differs(first, middle):
                last = middle
            elif self._differs(middle, last):
                first = middle
            else:
                break
        return [partial(_those, first, last)]

    def _differs(self, first: int, last: int) -> bool:
        return self._results(_Damage(self.site, partial(_those, first, last)))[0]

    def _results(self, damage: _Damage) -> tuple[bool, bool]:
        """Whether any result differs from those without a fault, and whether it is judged wrong."""
        try:
            with _Watch(self.site.launch < 0, damage).on(self.check.backend):
                results = self.attempt.results(self.run)
        except Exception:  # what raises does not pass for right
            return True, True
        differs = not all(torch.equal(x, y) for x, y in zip(results, self.clean, strict=True))
        return differs, differs and bool(self.attempt.judge(results)[1])


def _one_at(where: float, count: int) -> tuple[int, ...]:
    return (int(where * count),)


def _those(first: int, last: int, count: int) -> range:
    return range(first, last)


class _Watch:
    """Watches one run: launches, or with passes what the backend's passes return. Without damage sites are noted."""

    def __init__(self, passes: bool, damage: _Damage | None = None) -> None:
        self.passes, self.damage = passes, damage
        self.launches = 0
        self.sites: list[_Site] = []
        # of each launch, by its number, the kernel and its tensors; held, so that no memory is used twice
        self.taken: list[tuple[str, dict[str, Tensor]]] = []

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

    def chosen(self) -> Iterator[_Site]:
        """The sites that get a fault."""
        launches: dict[tuple[str, str], list[int]] = {}
        for site in self.sites:
            launches.setdefault((site.kernel, site.tensor), []).append(site.launch)
        for key, writing in launches.items():
            if len(writing) > _EACH:
                launches[key] = [writing[round(where * (len(writing) - 1))] for where in _SOME]
        return (site for site in self.sites if site.launch in launches[site.kernel, site.tensor])

    def reason(self, site: _Site) -> str:
        """Why nothing of a tensor reaches a result."""
        if site.launch < 0:
            return "nothing reads it"
        place = _memory(self.taken[site.launch][1][site.tensor])
        later = self.taken[site.launch + 1 :]
        takers = {name: None for name, tensors in later if any(_memory(x) == place for x in tensors.values())}
        if not takers:
            return "no later launch takes it"
        return f"only {', '.join(takers)} takes it, for what nobody asked for"

    def _launched(self, kernel: str, tensors: dict[str, Tensor], start: Callable[[], None]) -> None:
        number, self.launches = self.launches, self.launches + 1
        if self.damage is not None and (self.damage.site.launch, self.damage.site.kernel) != (number, kernel):
            start()
            return
        before = {name: x.clone() for name, x in tensors.items()}
        start()
        if self.damage is not None:
            name = self.damage.site.tensor
            self.damage.spoil(tensors[name], _written(tensors[name], before[name]))
            return
        self.taken.append((kernel, tensors))
        written = (name for name, x in tensors.items() if _written(x, before[name]).any())
        self.sites += [_Site(number, kernel, name) for name in written]

    def _returned(self, way: str, found: Iterable[Any]) -> None:
        for n, x in enumerate(found):
            if not (isinstance(x, Tensor) and x.is_floating_point() and x.numel()):
                continue
            site = _Site(-1, way, str(n))
            if self.damage is None:
                self.sites.append(site)
            elif self.damage.site == site:
                self.damage.spoil(x, torch.ones_like(x, dtype=torch.bool))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


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

    instead = {way: passing(way) for way in _PASSES if hasattr(backend, way)}
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
