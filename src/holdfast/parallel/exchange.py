"""One pass over a sequence that several ranks hold: local summaries, one exchange of them, local outputs."""

import zlib
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.recording import note_values_read
from holdfast.recurrences.summary import Summary

from .group import Ranks, agree, gather, held
from .places import Piece, Places, places_of


class Span(Protocol):
    """What carries a state through time, over one span of tokens: an op's call, or a short convolution's."""

    @property
    def name(self) -> str: ...

    @property
    def lead(self) -> Tensor:
        """[B, T, ...], of the device and dtype of all."""

    @property
    def dtype(self) -> torch.dtype:
        """Of states."""

    @property
    def needs_grad(self) -> bool: ...

    def cut(self, start: int, end: int) -> "Span": ...

    def fold(self, spans: int) -> "Span": ...

    def start(self, rows: int) -> Summary:
        """The state before a first token."""

    def summary(self) -> Summary: ...

    def merge(self, earlier: Summary, later: Summary) -> Summary: ...

    def outputs(
        self, state: Summary | None, cu_seqlens: Tensor | None, final: bool
    ) -> tuple[Tensor, Summary | None]: ...


def through_ranks(
    call: Span, given: Summary | None, final: bool, cu_seqlens: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Summary | None]:
    """The outputs of this rank's tokens, and the final states as far as they are known without another exchange.

    call: over this rank's tokens; with two spans a rank, both end to end. given: the state before each sequence's first
    token, of which a rank reads the rows of the sequences that begin with it. cu_seqlens: of the sequences of all
    ranks' tokens together. Returns the output, and final states if asked for: of all sequences on every rank without
    cu_seqlens; with it those of the sequences that end on this rank, and zeros in the rows of the others.

    Raises ValueError for what the ranks do not agree in, for an odd T with two spans, and for cu_seqlens that do not go
    from 0 to the tokens of all ranks; RuntimeError where a rank has gone.
    """
    length = call.lead.shape[1]
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens)
    lengths = None
    # a graph for any sizes has none to compare
    if bounds is not None or not torch.compiler.is_compiling():
        sizes = _sizes(call, given, bounds, ranks)
        lengths = agree(sizes, length, bounds is not None, call.lead.device, ranks, call.name)
    # of all ranks, if they were asked, so that all of them raise
    if odd := [tokens for tokens in lengths or [length] if tokens % ranks.spans]:
        raise ValueError(f"layout: expected an even T on every rank with 'zigzag', for its two spans; got T = {odd[0]}")
    if ranks.size == 1 and ranks.spans == 1:
        return call.outputs(given, cu_seqlens, final)
    if bounds is None:
        return _batch(call, given, final, ranks)
    each = ranks.in_order([[tokens // ranks.spans] * ranks.spans for tokens in lengths])
    return _packed(call, given, final, cu_seqlens, places_of(each, bounds), ranks)


def _bounds(cu_seqlens: Tensor) -> list[int]:
    note_values_read()
    return cu_seqlens.tolist()


def _needs_grad(call: Span, given: Summary | None) -> bool:
    return call.needs_grad or (torch.is_grad_enabled() and given is not None and given.added.requires_grad)


def _sizes(call: Span, given: Summary | None, bounds: list[int] | None, ranks: Ranks) -> dict[str, Any]:
    """What the ranks have to agree in, by the name at fault: as an integer, and how one is shown."""
    shape = 0
    for size in call.start(0).added.shape[1:]:
        shape = (shape << 20) + size
    return {
        call.name: (zlib.crc32(call.name.encode()), lambda x: f"op {x:08x}"),
        f"{call.name}'s batch": (call.lead.shape[0], lambda x: f"B = {x}"),
        f"{call.name}'s dtype": (_DTYPES.index(call.lead.dtype), lambda x: str(_DTYPES[x])),
        f"{call.name}'s state": (shape, lambda x: str([x >> n & 0xFFFFF for n in (40, 20, 0)])),
        f"{call.name}'s requires_grad": (int(_needs_grad(call, given)), lambda x: str(bool(x))),
        "cu_seqlens": (-1 if bounds is None else zlib.crc32(repr(bounds).encode()), _show_offsets),
        "layout": (ranks.spans, lambda x: ("contiguous", "zigzag")[x - 1]),
    }


def _show_offsets(checksum: int) -> str:
    return "None" if checksum < 0 else f"offsets of checksum {checksum:08x}"


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _exchange(parts: list[Summary], ranks: Ranks, name: str, grad: bool) -> tuple[list[Summary], Tensor]:
    """The summaries of every rank's spans, in the order of the tokens, from this rank's; and what they came in.

    grad: whether a backward pass may follow, on any rank.
    """
    shapes = [None if x is None else x.shape for x in parts[0]]
    message = torch.cat([x.flatten() for part in parts for x in part if x is not None])
    if grad and not message.requires_grad:
        # the backward pass has an exchange too, in which this rank has to take part
        message.requires_grad_()
    gathered = gather(message, ranks, name)
    sizes = [shape.numel() for shape in shapes if shape is not None]
    every = []
    for row in gathered.unbind(0):
        pieces = iter(row.split(sizes * len(parts)))
        every.append([Summary(*(None if s is None else next(pieces).view(s) for s in shapes)) for _ in parts])
    return ranks.in_order(every), gathered


def _entering(call: Span, every: list[Summary], first: int, last: int) -> Summary:
    """The state before span last, where the sequence began in span first."""
    state = every[first]._replace(carry=None)
    for later in every[first + 1 : last]:
        state = call.merge(state, later)
    return state


def _row(state: Summary, start: int, end: int) -> Summary:
    return Summary(*(None if x is None else x[start:end] for x in state))


def _joined(states: list[Summary]) -> Summary:
    if len(states) == 1:
        return states[0]
    return Summary(*(None if x[0] is None else torch.cat(x) for x in zip(*states, strict=True)))


def _begun(call: Span, state: Summary, local: Summary) -> Summary:
    """A span's summary with the state before it inside, which no later one has to reach behind."""
    return call.merge(state, local)._replace(carry=local.carry)


def _batch(call: Span, given: Summary | None, final: bool, ranks: Ranks) -> tuple[Tensor, Summary | None]:
    batch = call.lead.shape[0]
    spans = ranks.spans
    folded = call if spans == 1 else call.fold(spans)
    local = _apart(folded.summary(), spans)
    if ranks.rank == 0:
        own = call.start(batch) if given is None else given
        local[0] = _begun(call, own, local[0])
    every, gathered = _exchange(local, ranks, call.name, _needs_grad(call, given))
    entering = [own if place == 0 else _entering(call, every, 0, place) for place in ranks.places]
    o, _ = folded.outputs(_together(entering), None, False)
    if spans > 1:
        o = o.unflatten(0, (batch, spans)).flatten(1, 2)
    return held(o, gathered), _entering(call, every, 0, ranks.count) if final else None


def _apart(x: Summary, spans: int) -> list[Summary]:
    """Of rows [B * spans], those of each span."""
    return [Summary(*(None if y is None else y[span::spans] for y in x)) for span in range(spans)]


def _together(parts: list[Summary]) -> Summary:
    """The reverse of `_apart`."""
    if len(parts) == 1:
        return parts[0]
    return Summary(*(None if x[0] is None else torch.stack(x, 1).flatten(0, 1) for x in zip(*parts, strict=True)))


def _packed(
    call: Span, given: Summary | None, final: bool, cu_seqlens: Tensor, places: Places, ranks: Ranks
) -> tuple[Tensor, Summary | None]:
    width = call.lead.shape[1] // ranks.spans
    parts = [_outgoing(call, given, span * width, place, places) for span, place in enumerate(ranks.places)]
    every, gathered = _exchange(parts, ranks, call.name, _needs_grad(call, given))
    pieces = [places.pieces(place) for place in ranks.places]
    states = [
        _states(call, given, every, place, here, places)
        for place, here in zip(ranks.places, pieces, strict=True)
        if here
    ]
    flat = [piece for here in pieces for piece in here]
    sequences = len(places.bounds) - 1
    if not flat:
        o, _ = call.outputs(None, None, False)
        return held(o, gathered), _held(call.start(sequences), gathered) if final else None
    ends = [0, *accumulate(piece.length for piece in flat)]
    local = torch.tensor(ends, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    o, after = call.outputs(_joined(states), local, final)
    return held(o, gathered), _held(_ended(call, after, flat, sequences), gathered) if final else None


def _held(state: Summary, gathered: Tensor) -> Summary:
    return Summary(*(None if x is None else held(x, gathered) for x in state))


def _outgoing(call: Span, given: Summary | None, offset: int, place: int, places: Places) -> Summary:
    """The summary of the sequence that goes on behind a span, from the state before it if it begins there."""
    start, end, sequence = places.outgoing(place)
    local = call.cut(offset + start, offset + end).summary()
    if sequence is None or places.bounds[sequence] < places.starts[place]:
        return local
    own = call.start(1) if given is None else _row(given, sequence, sequence + 1)
    return _begun(call, own, local)


def _states(
    call: Span, given: Summary | None, every: list[Summary], place: int, pieces: list[Piece], places: Places
) -> Summary:
    """The state before each piece of a span."""
    first, last = pieces[0].sequence, pieces[-1].sequence + 1
    entering = []
    if not pieces[0].begins:
        entering = [_entering(call, every, places.begun_in(first), place)]
        first += 1
    own = [call.start(last - first) if given is None else _row(given, first, last)] if last > first else []
    return _joined(entering + own)


def _ended(call: Span, after: Summary, pieces: list[Piece], sequences: int) -> Summary:
    """States behind pieces as rows of all sequences: those of the sequences that ended, zeros for the others."""
    rows = call.start(sequences)
    where = [n for n, piece in enumerate(pieces) if piece.ends]
    if not where:
        return rows
    device = after.added.device
    taken = torch.tensor(where, dtype=torch.int64, device=device)
    put = torch.tensor([pieces[n].sequence for n in where], dtype=torch.int64, device=device)
    return Summary(*(None if x is None else x.index_copy(0, put, y[taken]) for x, y in zip(rows, after, strict=True)))
