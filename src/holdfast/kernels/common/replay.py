"""A call's launches, allocations and PyTorch operations, recorded once and run again without the Python between them.

What the host does for a call - checks, plans, grids, strides, what a kernel was compiled for - is the same for every
call whose arguments have the same shapes, strides, dtypes and alignments. The second such call is recorded; from the
third on only what was recorded runs, on the addresses of the day. A call that reads values on the host, or launches by
another way than triton_launch and gluon_launch, is not recorded and runs as before.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .planning import remembered

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
# of a thread that records
RECORDING: dict[int, "Recorder"] = {}
# Holdfast's ops, and what they run: a dispatch mode would see the op alone
_BENEATH: dict[Any, Callable[..., Any]] = {}


def look_beneath(op: Any, run: Callable[..., Any]) -> None:
    """Lets a recording see what op does: run, on tensors without autograd."""
    _BENEATH[op] = run


def note_launch(run: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
    """Adds a launch to what this thread records, if it does. run: what `direct_launch.launcher` returned."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.launch(run, grid, arguments)


def note_values_read() -> None:
    """Keeps the call that this thread records, if it does, from being replayed: what it does depends on values."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.failed = "it reads values on the host"


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of a recording: an argument, or what a step made."""

    number: int


class _Allocation:
    """Memory like a recorded allocation."""

    def __init__(self, out: Tensor, slot: int, dtype: torch.dtype) -> None:
        self.slot, self.shape, self.how = slot, tuple(out.shape), {}
        if out.dtype != dtype:
            self.how["dtype"] = out.dtype
        self.strides = None if out.is_contiguous() else out.stride()
        self.outputs, self.reads, self.changes = [slot], [], False

    def __call__(self, slots: list[Any]) -> None:
        if self.strides is None:
            slots[self.slot] = slots[0].new_empty(self.shape, **self.how)
        else:
            slots[self.slot] = slots[0].new_empty_strided(self.shape, self.strides, **self.how)


class _Operation:
    """A PyTorch operation."""

    def __init__(
        self, op: Any, arguments: Any, keywords: Any, outputs: list[int], many: bool, reads: list[int], changes: bool
    ) -> None:
        self.op, self.arguments, self.keywords = op, arguments, keywords
        self.outputs, self.many, self.reads, self.changes = outputs, many, reads, changes

    def __call__(self, slots: list[Any]) -> None:
        out = self.op(*_filled(self.arguments, slots), **_filled(self.keywords, slots))
        for slot, x in zip(self.outputs, out if self.many else (out,), strict=True):
            slots[slot] = x


class _Launch:
    """A kernel's launch. pointers: of a value its place, the slot and the offset that it is the address of."""

    def __init__(self, direct: Any, grid: tuple[int, int, int], arguments: Sequence[Any], recorder: "Recorder") -> None:
        self.direct, self.grid = direct, grid
        self.values: list[Any] = []
        self.pointers: list[tuple[int, int, int]] = []
        self.maps: list[tuple[int, int, int, dict[int, bytes], Callable[[int], bytes]]] = []
        for place, tiles in direct.places:
            x = arguments[place]
            if tiles is not None:
                slot, offset = recorder.address(x.base)
                self.maps.append((len(self.values), slot, offset, {}, tiles.encoder(x)))
                self.values += (b"", *x.shape, *x.strides)
            elif isinstance(x, Tensor):
                self.pointers.append((len(self.values), *recorder.address(x)))
                self.values.append(0)
            else:
                self.values.append(x)
        self.reads = [entry[1] for entry in (*self.pointers, *self.maps)]
        self.outputs, self.changes = [], True

    def __call__(self, slots: list[Any]) -> None:
        values = self.values.copy()
        for at, slot, offset in self.pointers:
            values[at] = slots[slot].data_ptr() + offset
        for at, slot, offset, known, encode in self.maps:
            address = slots[slot].data_ptr() + offset
            found = known.get(address)
            if found is None:
                if len(known) >= 1024:
                    known.clear()
                found = known[address] = encode(address)
            values[at] = found
        self.direct.start(self.grid, values)


def _filled(x: Any, slots: list[Any]) -> Any:
    """x with tensors in the place of slots."""
    kind = type(x)
    if kind is _Slot:
        return slots[x.number]
    if kind is tuple or kind is list:
        return kind([_filled(part, slots) for part in x])
    if kind is dict:
        return {name: _filled(part, slots) for name, part in x.items()}
    return x


class Recorder(TorchDispatchMode):
    """Records what this thread does on tensors and those that come of them. failed: why it cannot be run again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = tensors[0].device
        self.count = len(tensors)
        # by slot; held, so that an id stays one tensor's
        self.tensors = list(tensors)
        self.others: list[Tensor] = []
        self.slots = {id(x): n for n, x in enumerate(tensors)}
        # of a view the slot that owns its memory, and where in it the view begins
        self.places: dict[int, tuple[int, int]] = {}
        self.steps: list[Any] = []
        self.failed = "" if len(self.slots) == len(tensors) else "one tensor is several arguments"

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if op in _BENEATH:
            with self:
                return _BENEATH[op](*args, **kwargs)
        out = op(*args, **kwargs)
        if not self.failed:
            self._note(op, args, kwargs, out)
        return out

    def _new(self, x: Tensor) -> int:
        self.slots[id(x)] = number = len(self.tensors)
        self.tensors.append(x)
        return number

    def _note(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        many = isinstance(out, tuple | list)
        outputs = list(out) if many else [out]
        if not any(isinstance(x, Tensor) for x in (*tree_leaves((args, kwargs)), *outputs)):
            # of dtypes, say
            return
        if any(not isinstance(x, Tensor) or x.device != self.device for x in outputs):
            self.failed = f"{op} leaves the device"
            return
        if any(tag in op.tags for tag in _UNREPEATABLE):
            self.failed = f"{op} depends on values"
            return
        if not many and id(out) in self.slots and not op._schema.is_mutable:
            # its argument, as it came
            return
        if op is aten.detach.default and id(args[0]) in self.slots:
            # below autograd the same tensor
            self.others.append(out)
            self.slots[id(out)] = self.slots[id(args[0])]
            return
        if op in _ALLOCATIONS:
            self.steps.append(_Allocation(out, self._new(out), self.tensors[0].dtype))
            return
        reads: list[int] = []
        arguments, keywords = self._slotted(list(args), reads), self._slotted(dict(kwargs), reads)
        schema = op._schema
        aliases = [r.alias_info for r in schema.returns]
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        numbers = [self.slots.get(id(x)) if changes else None for x in outputs]
        numbers = [self._new(x) if n is None else n for n, x in zip(numbers, outputs, strict=True)]
        if not changes and reads and any(alias is not None for alias in aliases):
            base = self.tensors[reads[0]]
            owner, offset = self.address(base)
            for x, n in zip(outputs, numbers, strict=True):
                # what may be a view, as of contiguous or reshape, may be a copy
                if x.untyped_storage()._cdata == base.untyped_storage()._cdata:
                    self.places[n] = owner, offset + x.data_ptr() - base.data_ptr()
        self.steps.append(_Operation(op, arguments, keywords, numbers, many, reads, changes))

    def _slotted(self, x: Any, reads: list[int]) -> Any:
        if isinstance(x, Tensor):
            number = self.slots.get(id(x))
            if number is None:
                self.failed = "a tensor from elsewhere"
                return x
            reads.append(number)
            return _Slot(number)
        if isinstance(x, tuple | list):
            return type(x)([self._slotted(part, reads) for part in x])
        if isinstance(x, dict):
            return {name: self._slotted(part, reads) for name, part in x.items()}
        return x

    def address(self, x: Tensor) -> tuple[int, int]:
        """The slot that owns x's memory, and the bytes from its beginning to x."""
        number = self.slots.get(id(x))
        if number is None:
            self.failed = "a tensor from elsewhere"
            return 0, 0
        return self.places.get(number, (number, 0))

    def launch(self, run: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        if not hasattr(run, "places"):
            self.failed = "a launch of Triton's own"
        elif not self.failed:
            self.steps.append(_Launch(run, grid, arguments, self))

    def replay(self, outputs: Any, changed: list[int]) -> "Replay | None":
        """What was recorded, to be run again; None where it cannot be. changed: arguments that were written to."""
        reads: list[int] = []
        slotted = self._slotted(outputs, reads)
        if self.failed:
            return None
        kept, steps = set(reads), []
        needed = set(kept)
        for step in reversed(self.steps):
            if step.changes or needed.intersection(step.outputs):
                steps.append(step)
                needed.update(step.reads)
        return Replay(steps[::-1], self.count, len(self.tensors), slotted, kept, changed)


class Replay:
    """Runs what was recorded on other tensors."""

    def __init__(
        self, steps: list[Any], count: int, size: int, outputs: Any, kept: set[int], changed: list[int]
    ) -> None:
        self.rest, self.outputs, self.changed = [None] * (size - count), outputs, changed
        last = {slot: n for n, step in enumerate(steps) for slot in step.reads if slot >= count and slot not in kept}
        self.steps = [(step, [slot for slot, n in last.items() if n == at]) for at, step in enumerate(steps)]

    def __call__(self, tensors: list[Tensor]) -> Any:
        slots = [*tensors, *self.rest]
        for step, done in self.steps:
            step(slots)
            for slot in done:
                slots[slot] = None
        if self.changed:
            # autograd finds by a tensor's version that what it saved has been written to
            torch.autograd.graph.increment_version([tensors[n] for n in self.changed])
        return _filled(self.outputs, slots)


_CONSTANT = {int, float, bool, str, type(None), torch.dtype, torch.device}
_keys_of = torch._C._dispatch_keys
# dispatch keys of tensors that are memory and strides, nothing else: no subclass, transform or lazy negation
_PLAIN: set[int] = set()


def _read(values: Any, key: list[Any], tensors: list[Tensor], grad: bool) -> bool:
    """Appends all that decides how a call of these values runs, and its tensors. False for what is no plain tensor, or
    with grad for a tensor that needs a gradient."""
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            keys = _keys_of(x).raw_repr()
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
        elif kind in _CONSTANT:
            key.append(x)
        else:
            return False
    return True


def allow(device: torch.device) -> None:
    """Lets calls on tensors of a kind of device be recorded."""
    with torch.inference_mode():
        inferred = torch.empty(0, device=device)
    with torch.inference_mode(False):
        _PLAIN.update(_keys_of(x).raw_repr() for x in (inferred, torch.empty(0, device=device)))


def _watched() -> bool:
    """Whether something looks at, or changes, the operations of this thread."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


# in the place of a recording: the call has been made once
_SEEN = object()


def replayed(run: Callable[..., Any], above_autograd: bool = True) -> Callable[..., Any]:
    """run, which launches with triton_launch and gluon_launch alone; calls on a GPU are recorded, then replayed.

    above_autograd: run is what users call, under autograd and autocast, and is run itself where they take part.
    """
    known: dict[Any, Any] = remembered()

    @wraps(run, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return run(*arguments, **named)
        key: list[Any] = []
        tensors: list[Tensor] = []
        grad = above_autograd and torch.is_grad_enabled()
        if not (_read(arguments, key, tensors, grad) and (not named or _read((named,), key, tensors, grad))):
            if not _PLAIN and torch.cuda.is_initialized():
                allow(torch.device("cuda"))
            return run(*arguments, **named)
        if not tensors:
            return run(*arguments, **named)
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            return run(*arguments, **named)
        if above_autograd and torch.is_autocast_enabled(tensors[0].device.type):
            return run(*arguments, **named)
        place = tuple(key)
        found = known.get(place)
        if found.__class__ is Replay:
            return found(tensors)
        if found is None:
            if len(known) >= 4096:
                known.clear()
            known[place] = _SEEN
        elif found is _SEEN and not (device >= 0 and torch.cuda.is_current_stream_capturing()):
            # what is checked on the host is not while a graph is captured
            return _record(run, arguments, named, tensors, known, place)
        return run(*arguments, **named)

    return call


def _record(run: Any, arguments: Any, named: Any, tensors: list[Tensor], known: dict[Any, Any], place: Any) -> Any:
    thread, recorder = threading.get_ident(), Recorder(tensors)
    before = [None if x.is_inference() else x._version for x in tensors]
    RECORDING[thread] = recorder
    try:
        with recorder:
            outputs = run(*arguments, **named)
    finally:
        del RECORDING[thread]
    changed = [n for n, x in enumerate(tensors) if before[n] is not None and x._version != before[n]]
    known[place] = recorder.replay(outputs, changed) or False
    return outputs
