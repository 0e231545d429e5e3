"""A call's launches, allocations and PyTorch operations, recorded once and run again without the Python between them.

What the host does for a call - checks, plans, grids, strides, what a kernel was compiled for - is the same for every
call whose arguments have the same shapes, strides, dtypes and alignments. The second such call is recorded; from the
third on only what was recorded runs, on the addresses of the day. A call that reads values on the host, or launches by
another way than by launch.py and descriptor_launch.py, is not recorded and runs as before.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from holdfast.kernels.runtime.compile_pool import is_dry_run, with_parallel_compile
from holdfast.kernels.runtime.dynamo import disable_dynamo
from holdfast.kernels.runtime.torch_private import (
    dispatch_keys,
    is_any_autocast_on,
    is_observed,
    version_of,
    without_autocast,
)
from holdfast.kernels.runtime.watching import WATCHERS
from holdfast.kernels.select import clearable_cache

from .arena import pack_arena
from .autograd_path import find_fast_path
from .guard import CONSTANT, CallGuard, autocast_dtype
from .recording import RECORDING, Recorder, filled
from .refusals import count_refusal

P = ParamSpec("P")
R = TypeVar("R")


class Replay:
    """Runs what was recorded on other tensors."""

    def __init__(
        self, recorder: Recorder, steps: list[Any], outputs: Any, output_slots: set[int], changed: list[int]
    ) -> None:
        """steps, outputs, output_slots: as of `Recorder.needed`. changed: arguments that were written to."""
        count, steps = recorder.count, pack_arena(steps, output_slots)
        self.rest, self.outputs, self.changed = [None] * (len(recorder.tensors) - count), outputs, changed
        self.guard: CallGuard | None = None
        reads = ((slot, n) for n, step in enumerate(steps) for slot in step.reads)
        last = {slot: n for slot, n in reads if slot >= count and slot not in output_slots}
        # of each step the slots that nothing reads after it
        done: list[list[int]] = [[] for _ in steps]
        for slot, n in last.items():
            done[n].append(slot)
        self.steps = list(zip(steps, done, strict=True))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if is_any_autocast_on():
            # its casts are among what was recorded, and it is off where an op turned it off
            with without_autocast():
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> Any:
        slots = [*tensors, *self.rest]
        for step, done in self.steps:
            step(slots)
            for slot in done:
                slots[slot] = None
        if self.changed:
            # autograd finds by a tensor's version that what it saved has been written to
            torch.autograd.graph.increment_version([tensors[n] for n in self.changed])
        return filled(self.outputs, slots)


# dispatch keys of tensors that are memory and strides, nothing else: no subclass, transform or lazy negation
_PLAIN: set[int] = set()


def _read(values: Any, key: list[Any], tensors: list[Tensor], grad: bool) -> bool:
    """Append all that decides how a call of these values runs, and its tensors.

    Return False for what is no plain tensor, or with grad for a tensor that needs a gradient.
    """
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            keys = dispatch_keys(x).raw_repr()
            if keys not in _PLAIN or (grad and x.requires_grad):
                return False
            tensors.append(x)
            key += (keys, x.get_device(), x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
        elif kind is tuple or kind is list:
            key.append(len(x))
            if not _read(x, key, tensors, grad):
                return False
        elif kind is dict:
            key += x
            if not _read(x.values(), key, tensors, grad):
                return False
        elif kind is float or kind is bool:
            # 1, 1.0 and True are equal
            key += (kind, x)
        elif kind in CONSTANT:
            key.append(x)
        else:
            return False
    return True


def _first_places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor where it first is an argument: which arguments are one."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(x), n) for n, x in enumerate(tensors)])


def allow(device: torch.device) -> None:
    """Let calls on tensors of a kind of device be recorded."""
    with torch.inference_mode():
        inferred = torch.empty(0, dtype=torch.float32, device=device)
    with torch.inference_mode(False):
        plain = torch.empty(0, dtype=torch.float32, device=device)
    _PLAIN.update(dispatch_keys(x).raw_repr() for x in (inferred, plain))


# as long as anything is in it, calls are neither recorded nor replayed
_DISABLED: list[None] = []


@contextmanager
def disabled() -> Iterator[None]:
    """Within it every call runs in full, on all threads, as autograd's run the backward pass."""
    _DISABLED.append(None)
    try:
        yield
    finally:
        _DISABLED.pop()


# in the place of a replay: the call has been made once
_SEEN_ONCE = object()
# in the place of a signature: what ran last
_LAST_HIT = object()


def replayed(run: Callable[P, R], above_autograd: bool = True, changes: bool = False) -> Callable[P, R]:
    """run, which launches by launch.py and descriptor_launch.py alone; calls on a GPU are recorded, then replayed.

    above_autograd: run is what users call, under autograd, and is run itself where a gradient is recorded.
    changes: run writes to its arguments, so that no dry run may run it.
    """
    cache: dict[Any, Any] = clearable_cache()
    name = _name_of(run)

    @wraps(run, updated=())
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _DISABLED or WATCHERS or is_observed():
            return run(*arguments, **named)
        last = cache.get(_LAST_HIT)
        if last is not None and (tensors := last.guard(arguments, named)) is not None:
            return last(tensors)
        key: list[Any] = []
        tensors = []
        grad = above_autograd and torch.is_grad_enabled()
        if not (_read(arguments, key, tensors, grad) and (not named or _read((named,), key, tensors, grad))):
            if not _PLAIN and torch.cuda.is_initialized():
                allow(torch.device("cuda"))
            return _call_with_gradient(run, name, arguments, named, cache) if grad else run(*arguments, **named)
        if not tensors:
            return run(*arguments, **named)
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            return run(*arguments, **named)
        key.append(autocast_dtype(tensors[0].device.type))
        if len({*map(id, tensors)}) != len(tensors):
            key.append(_first_places(tensors))
        signature = tuple(key)
        hit = cache.get(signature)
        if hit.__class__ is Replay:
            if hit.guard is None:
                hit.guard = CallGuard(arguments, named)
            cache[_LAST_HIT] = hit
            return hit(tensors)
        if hit is None:
            cache[signature] = _SEEN_ONCE
            return run(*arguments, **named) if changes else with_parallel_compile(run, arguments, named)
        elif hit is _SEEN_ONCE and not (is_dry_run() or (device >= 0 and torch.cuda.is_current_stream_capturing())):
            # what is checked on the host is not while a graph is captured
            return _record(run, name, arguments, named, tensors, cache, signature)
        return run(*arguments, **named)

    return call


def replayed_below(run: Callable[P, R], changes: bool = False) -> Callable[P, R]:
    """`replayed` for what runs below autograd: a custom op's implementation, and the op where another op calls it."""
    return replayed(run, above_autograd=False, changes=changes)


def _name_of(run: Any) -> str:
    """Return what refusals call run: "gla", and "matrix_forward" both for that op and for the function that it runs."""
    name = run.__name__.removesuffix(".default")
    return run.__module__.rpartition(".")[2] + name if name.startswith("_") else name


def _call_with_gradient(run: Any, name: str, arguments: Any, named: Any, cache: dict[Any, Any]) -> Any:
    """Makes a call that may record a gradient, and looks for a faster path for others like it."""
    values = (*arguments, *named.values())
    kinds = (tuple(named), *map(type, values))
    paths = cache.get(kinds)
    if paths is False or is_dry_run() or not any(isinstance(x, Tensor) and x.requires_grad for x in values):
        return run(*arguments, **named)
    for path in paths or ():
        if (tensors := path.guard(arguments, named)) is not None:
            cache[_LAST_HIT] = path
            return path(tensors)
    outputs, found = find_fast_path(run, arguments, named)
    if isinstance(found, str):
        # a matter of kinds and constants rather than of shapes, of which there may be many
        count_refusal(name, found)
        cache[kinds] = False
    elif found is not None:
        cache[kinds] = [*(paths or ())[-7:], found]
    return outputs


@disable_dynamo
def _record(
    run: Any, name: str, arguments: Any, named: Any, tensors: list[Tensor], cache: dict[Any, Any], signature: Any
) -> Any:
    thread, recorder = threading.get_ident(), Recorder(tensors)
    before = [None if x.is_inference() else version_of(x) for x in tensors]
    RECORDING[thread] = recorder
    try:
        with recorder:
            outputs = run(*arguments, **named)
    finally:
        del RECORDING[thread]
    counted = [n for n, x in enumerate(tensors) if before[n] is not None and version_of(x) != before[n]]
    needed = recorder.needed(outputs)
    if needed is None:
        count_refusal(name, recorder.failed)
        cache[signature] = False
    else:
        cache[signature] = Replay(recorder, *needed, recorder.written(counted))
    return outputs
