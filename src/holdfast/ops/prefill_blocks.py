"""A prefill that leaves states behind blocks: block after block, or all of them side by side."""

import torch
from torch import Tensor

from holdfast.kernels.slots import read_states, write_states
from holdfast.recurrences.summary import Summary, merge

from .prefill_pieces import Pieces
from .span_call import SpanCall

# up to which size of a round, in numbers of the first argument, and from how many rounds on summaries are worth it:
# docs/notes/decoding.md#open
LITTLE, MANY = 2**20, 8


def by_blocks(
    call: SpanCall, pool: Tensor, slots: Tensor, next_slots: Tensor, block_slots: Tensor, pieces: Pieces
) -> Tensor:
    """o [1, T, ...] of packed sequences, and states from slots [N] of the pool to next_slots [N], and to block_slots,
    as `pooled_prefill` has them."""
    order, numbers, tokens = _placed([pieces.order, pieces.numbers], pieces.tokens(), pool.device)
    state = read_states(pool, slots.index_select(0, order), call.dtype)
    call = call if tokens is None else call.over_time(lambda x: reordered(x, tokens))
    outputs, behind, count, length = [], [], len(pieces.starts), call.lead.shape[1]
    end = count * pieces.block
    if count:
        numbers_each = call.lead[:, 0].numel() * pieces.block * pieces.rounds[0]
        is_side_by_side = are_better_side_by_side(pool.device, numbers_each, len(pieces.rounds))
        run = side_by_side if is_side_by_side else in_series
        o, behind = run(call.cut(0, end).fold(count), state, pieces.rounds)
        outputs.append(o.flatten(0, 1)[None])
        state = _last(state, behind, pieces.rounds)
    if end < length or not count:
        o, after = call.cut(end, length).outputs(Summary(state), pieces.tail_offsets())
        outputs.append(o)
        state = after.added
    if count:
        write_states(pool, block_slots.index_select(0, numbers), torch.cat(behind))
    write_states(pool, next_slots.index_select(0, order), state)
    o = torch.cat(outputs, 1)
    return o if tokens is None else torch.empty_like(o).index_copy_(1, tokens, o)


def reordered(x: Tensor, tokens: Tensor) -> Tensor:
    """x [1, T, ...] at these tokens. What is one number in memory along an axis stays so: delta rules take such keys in
    a wider dtype."""
    held = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    return (held if x.stride(1) == 0 else held.index_select(1, tokens)).expand(x.shape)


def are_better_side_by_side(device: torch.device, numbers: int, rounds: int) -> bool:
    """Whether a GPU would spend its time on starting one small round after the other. numbers: of a round's first
    argument."""
    return device.type == "cuda" and rounds > MANY and numbers <= LITTLE


def in_series(blocks: SpanCall, state: Tensor, rounds: list[int]) -> tuple[Tensor, list[Tensor]]:
    """o [M, block, ...] of blocks [M, block, ...], which lie round by round, and the states behind those of each round.

    state: before the blocks of the first round, and others behind them."""
    outputs, behind, done = [], [], 0
    for size in rounds:
        o, after = blocks.rows(done, done + size).outputs(Summary(state[:size]), None)
        state = after.added
        outputs.append(o)
        behind.append(state)
        done += size
    return torch.cat(outputs), behind


def side_by_side(blocks: SpanCall, state: Tensor, rounds: list[int]) -> tuple[Tensor, list[Tensor]]:
    """As `in_series`, to rounding: what each block does to a state, from these the state before each, then the op over
    all blocks at once. Each is computed twice, with a delta rule three times."""
    added, carry, _ = blocks.summary()
    before, behind, done = [], [], 0
    for size in rounds:
        span = Summary(added[done : done + size], carry[done : done + size])
        before.append(state[:size])
        state = merge(Summary(state[:size]), span).added
        behind.append(state)
        done += size
    return blocks.outputs(Summary(torch.cat(before)), None, final=False)[0], behind


def _last(state: Tensor, behind: list[Tensor], rounds: list[int]) -> Tensor:
    """The state behind each sequence's last block, of one without a block the one before it."""
    ends = [after[following:] for after, following in zip(behind, [*rounds[1:], 0], strict=True)]
    return torch.cat([x for x in (*reversed(ends), state[rounds[0] :]) if x.shape[0]])


def _placed(
    lists: list[list[int]], tokens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All on the device by one copy, for which the host waits."""
    parts = [torch.tensor(numbers, dtype=torch.int64) for numbers in lists]
    parts += [] if tokens is None else [tokens]
    first, second, *rest = torch.cat(parts).to(device).split([part.numel() for part in parts])
    return first, second, rest[0] if rest else None
