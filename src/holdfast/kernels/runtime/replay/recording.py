"""What one thread does in a call, recorded: launches, allocations and operations, and on whose memory each works."""

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.torch_private import empty_on_gpu, part_of, shares_storage
from holdfast.recurrences.torch_private import DispatchMode, is_mutable, schema_of, tree_leaves

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
# at a few KiB each
_BOUND = 512
# what is recorded outlives its use until the record is made: a loop over a long sequence would run out of memory
MOST_STEPS = 4096
# what depends on where in its storage a tensor begins, which calls that are alike need not have in common
_OF_STORAGE = {aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default}
_OF_STORAGE |= {aten.as_strided_scatter.default, aten.view_as_complex.default}
_UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
# of a thread that records
RECORDING: dict[int, "Recorder"] = {}
# Holdfast's ops, and what they run: a dispatch mode would see the op alone
_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}


def register_implementation(op: Any, run: Callable[..., Any]) -> None:
    """Let a recording see what op does: run, on tensors without autograd."""
    _IMPLEMENTATIONS[op] = run


def note_launch(run: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
    """Add a launch to what this thread records, if it does. run: what `driver.launcher` returned."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.launch(run, grid, arguments)


def mark_unrecordable() -> None:
    """Keeps the call that this thread records, if it does, from being replayed: it launches by what has no record."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.fail("a launch of Triton's own")


def note_values_read() -> None:
    """Keeps the call that this thread records, if it does, from being replayed: what it does depends on values."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.fail("it reads values on the host")


def note_written(tensors: Sequence[Tensor]) -> None:
    """Tells what this thread records, if it does, that an op writes to these."""
    recorder = RECORDING.get(threading.get_ident())
    if recorder is not None:
        recorder.write(tensors)


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a recording: an argument, or what a step made."""

    number: int


class Allocation:
    """Memory of a shape, strides and dtype, into a slot."""

    def __init__(
        self, slot: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slot, self.shape, self.strides, self.dtype, self.device = slot, shape, strides, dtype, device
        self.outputs, self.reads, self.changes = [slot], [], False
        by_pytorch = partial(_empty, device=device)
        self.empty = by_pytorch if empty_on_gpu is None or device.type != "cuda" else empty_on_gpu

    def __call__(self, slots: list[Any]) -> None:
        slots[self.slot] = self.empty(self.shape, self.strides, self.dtype)


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Operation:
    """A PyTorch operation."""

    def __init__(
        self, op: Any, arguments: Any, keywords: Any, outputs: list[int], many: bool, reads: list[int], changes: bool
    ) -> None:
        self.op, self.arguments, self.keywords = op, arguments, keywords
        self.outputs, self.many, self.reads, self.changes = outputs, many, reads, changes
        # where slots are, if none is within a list, as most often: found at once then
        places = [(n, x.number) for n, x in enumerate(arguments) if type(x) is Slot]
        self.places = places if len(places) == len(reads) else None

    def __call__(self, slots: list[Any]) -> None:
        if self.places is None:
            out = self.op(*filled(self.arguments, slots), **filled(self.keywords, slots))
        else:
            arguments = self.arguments.copy()
            for n, slot in self.places:
                arguments[n] = slots[slot]
            out = self.op(*arguments, **self.keywords)
        if self.many:
            for slot, x in zip(self.outputs, out, strict=True):
                slots[slot] = x
        else:
            slots[self.outputs[0]] = out


class View:
    """A part of the memory that a slot owns, at once, however many operations led to it."""

    def __init__(self, slot: int, x: Tensor, owner: int, offset: int) -> None:
        """x: the view of the recording. offset: in bytes from the owner's first number."""
        self.slot, self.owner = slot, owner
        self.shape, self.strides = tuple(x.shape), x.stride()
        # an empty one has no address
        self.offset = offset // x.element_size() if x.numel() else 0
        self.outputs, self.reads, self.changes = [slot], [owner], False

    def __call__(self, slots: list[Any]) -> None:
        slots[self.slot] = part_of(slots[self.owner], self.shape, self.strides, self.offset)


class Launch:
    """A kernel's launch. parts: of each address among its values the slot and the offset that it is of.

    It is bound to addresses that come again, as they do in a loop: then nothing is left to be packed.
    """

    def __init__(self, direct: Any, grid: tuple[int, int, int], arguments: Sequence[Any], recorder: "Recorder") -> None:
        self.direct, self.grid, self.bind = direct, grid, getattr(direct, "bound", None)
        self.values: list[Any] = []
        self.parts: list[tuple[int, int]] = []
        # where each address goes, what makes a descriptor's map of it, and the maps made
        self.places: list[tuple[int, Callable[[int], bytes] | None, dict[int, bytes]]] = []
        for place, tiles in direct.places:
            x = arguments[place]
            if tiles is not None:
                self.parts.append(recorder.address(x.base))
                self.places.append((len(self.values), tiles.encoder(x), {}))
                self.values += (b"", *x.shape, *x.strides)
            elif isinstance(x, Tensor):
                self.parts.append(recorder.address(x))
                self.places.append((len(self.values), None, {}))
                self.values.append(0)
            else:
                self.values.append(x)
        self.known: dict[tuple[int, ...], Callable[[], None] | None] = {}
        self.outputs, self.changes = [], True

    @property
    def reads(self) -> list[int]:
        """Slots of all memory that it works on."""
        return [slot for slot, _ in self.parts]

    def moved(self, starts: dict[int, int], arena: int) -> "Launch":
        """The launch with the slots of starts as so many bytes into the arena's slot."""
        other = copy(self)
        other.parts = [
            (arena, offset + starts[slot]) if slot in starts else (slot, offset) for slot, offset in self.parts
        ]
        other.known = {}
        return other

    def __call__(self, slots: list[Any]) -> None:
        addresses = tuple([slots[slot].data_ptr() + offset for slot, offset in self.parts])
        run = self.known.get(addresses)
        if run is None:
            self._start(addresses)
        else:
            run()

    def _start(self, addresses: tuple[int, ...]) -> None:
        values = self.values.copy()
        for (at, encode, known), address in zip(self.places, addresses, strict=True):
            values[at] = address if encode is None else _remembered(known, address, encode)
        if addresses in self.known and self.bind is not None:
            run = self.known[addresses] = self.bind(self.grid, values)
            run()
            return
        if len(self.known) >= _BOUND:
            self.known.clear()
        self.known[addresses] = None
        self.direct.start(self.grid, values)


def _remembered(known: dict[int, bytes], address: int, encode: Callable[[int], bytes]) -> bytes:
    found = known.get(address)
    if found is None:
        # another thread may clear it at any time
        if len(known) >= 1024:
            known.clear()
        found = known[address] = encode(address)
    return found


def filled(x: Any, slots: list[Any]) -> Any:
    """x with tensors in the place of slots."""
    kind = type(x)
    if kind is Slot:
        return slots[x.number]
    if kind is tuple or kind is list:
        return kind([filled(part, slots) for part in x])
    if kind is dict:
        return {name: filled(part, slots) for name, part in x.items()}
    return x


class Recorder(DispatchMode):
    """Records what this thread does on tensors and those that come of them. failed: why it cannot be run again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = tensors[0].device
        self.count = len(tensors)
        # by slot; held, so that an id stays one tensor's
        self.tensors = list(tensors)
        self.others: list[Tensor] = []
        self.slots: dict[int, int] = {}
        for n, x in enumerate(tensors):
            # of one that is several arguments the first: calls that are replayed have the same ones in common
            self.slots.setdefault(id(x), n)
        # of a view the slot that owns its memory, and where in it the view begins
        self.places: dict[int, tuple[int, int]] = {}
        self.steps: list[Any] = []
        self.failed = ""
        # slots of arguments that ops and operations say they write to
        self.changed: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if op in _IMPLEMENTATIONS:
            with self:
                return _IMPLEMENTATIONS[op](*args, **kwargs)
        out = op(*args, **kwargs)
        if not self.failed:
            self._note(op, args, kwargs, out)
            if len(self.steps) > MOST_STEPS:
                self.fail(f"it takes more than {MOST_STEPS:,} steps")
        return out

    def fail(self, reason: str) -> None:
        """Keeps what is recorded from being run again. What a failure brings with it is no other reason."""
        if not self.failed:
            self.failed = reason
            self.steps.clear()
            self.others.clear()
            self.slots.clear()
            del self.tensors[self.count :]

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
            self.fail(f"{op} leaves the device")
            return
        if any(tag in op.tags for tag in _UNREPEATABLE):
            self.fail(f"{op} depends on values")
            return
        if op in _OF_STORAGE and self.address(args[0])[0] < self.count:
            self.fail(f"{op} depends on where in its storage an argument begins")
            return
        if not many and id(out) in self.slots and not is_mutable(op):
            # its argument, as it came
            return
        if op is aten.detach.default and id(args[0]) in self.slots:
            # below autograd the same tensor
            self.others.append(out)
            self.slots[id(out)] = self.slots[id(args[0])]
            return
        if op in _ALLOCATIONS:
            self.steps.append(Allocation(self._new(out), tuple(out.shape), out.stride(), out.dtype, out.device))
            return
        reads: list[int] = []
        arguments, keywords = self._slotted(list(args), reads), self._slotted(dict(kwargs), reads)
        if self.failed:
            return
        schema = schema_of(op)
        aliases = [r.alias_info for r in schema.returns]
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if changes:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            self.write(given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write)
        numbers = [self.slots.get(id(x)) if changes else None for x in outputs]
        numbers = [self._new(x) if n is None else n for n, x in zip(numbers, outputs, strict=True)]
        if not changes and reads and any(alias is not None for alias in aliases):
            base = self.tensors[reads[0]]
            owner, offset = self.address(base)
            for x, n in zip(outputs, numbers, strict=True):
                # what may be a view, as of contiguous or reshape, may be a copy
                if shares_storage(x, base):
                    self.places[n] = owner, offset + x.data_ptr() - base.data_ptr()
        self.steps.append(Operation(op, arguments, keywords, numbers, many, reads, changes))

    def _slotted(self, x: Any, reads: list[int]) -> Any:
        if isinstance(x, Tensor):
            number = self.slots.get(id(x))
            if number is None:
                self.fail("a tensor from elsewhere")
                return x
            reads.append(number)
            return Slot(number)
        if isinstance(x, tuple | list):
            return type(x)([self._slotted(part, reads) for part in x])
        if isinstance(x, dict):
            return {name: self._slotted(part, reads) for name, part in x.items()}
        return x

    def address(self, x: Tensor) -> tuple[int, int]:
        """The slot that owns x's memory, and the bytes from its beginning to x."""
        number = self.slots.get(id(x))
        if number is None:
            self.fail("a tensor from elsewhere")
            return 0, 0
        return self.places.get(number, (number, 0))

    def launch(self, run: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        if not hasattr(run, "places"):
            self.fail("a launch of Triton's own")
        elif not self.failed:
            self.steps.append(Launch(run, grid, arguments, self))

    def write(self, tensors: Iterable[Any]) -> None:
        """Note that these are written to, of which some are arguments or views of them."""
        slots = [self.slots[id(x)] for x in tree_leaves(list(tensors)) if id(x) in self.slots]
        self.changed.update(slot for slot in self._owners(slots) if slot < self.count)

    def written(self, counted: Iterable[int]) -> list[int]:
        """Return the arguments that are written to, of those whose version was counted up.

        Views of one tensor have one version, which tells nothing of the others: other calls' need not be views of one.
        """
        named = [self.tensors[n] for n in self.changed]
        return [n for n in counted if n in self.changed or not any(shares_storage(self.tensors[n], x) for x in named)]

    def needed(self, outputs: Any) -> tuple[list[Any], Any, set[int]] | None:
        """The steps that have to run again, outputs with slots for tensors, and those slots; None where they cannot."""
        reads: list[int] = []
        slotted = self._slotted(outputs, reads)
        if self.failed:
            return None
        output_slots, steps = set(reads), []
        # slots that are read later, and those that own their memory
        needed = output_slots | self._owners(output_slots)
        for step in reversed(self.steps):
            if self._is_needed(step, needed):
                views = [self._view(slot, output_slots) for slot in step.outputs if slot in needed]
                for done in [step] if step.changes or None in views else views:
                    steps.append(done)
                    needed.update(done.reads, self._owners(done.reads))
        return steps[::-1], slotted, output_slots

    def _view(self, slot: int, output_slots: set[int]) -> View | None:
        """The slot as a part of what owns its memory; None where it owns that itself, or is told from it by more."""
        if slot not in self.places:
            return None
        (owner, offset), x = self.places[slot], self.tensors[slot]
        base = self.tensors[owner]
        if x.dtype != base.dtype or x.is_conj() or base.is_conj() or x.is_neg() or base.is_neg():
            return None
        if slot in output_slots and (owner < self.count or len(output_slots & self._shared(owner)) > 1):
            # writes to one are counted for the others by PyTorch's own views alone
            return None
        return View(slot, x, owner, offset)

    def _shared(self, owner: int) -> set[int]:
        """The slots in one's memory, its own among them."""
        return {owner, *(slot for slot, (of, _) in self.places.items() if of == owner)}

    def _owners(self, slots: Iterable[int]) -> set[int]:
        return {self.places.get(slot, (slot, 0))[0] for slot in slots}

    def _is_needed(self, step: Any, needed: set[int]) -> bool:
        if isinstance(step, Operation) and step.changes:
            # what it writes to may be memory that nobody reads any more, as of a state that was not asked for
            written = self._owners(step.outputs)
            return not written or bool(needed & written) or min(written) < self.count
        return step.changes or bool(needed.intersection(step.outputs))
