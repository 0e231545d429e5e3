"""A prefill that leaves states behind blocks: block after block, or all of them side by side."""

import torch
from torch import Tensor

from holdfast.kernels.slots import read_states, write_states
from holdfast.recurrences.summary import Summary, merge

from .prefill_pieces import Pieces
from .span_call import SpanCall

# what a sequence has: of mlstm C, n and m, else one tensor; each [N, ...]
States = tuple[Tensor, ...]

# up to which size of a round, in numbers of the first argument, and from how many rounds on summaries are worth it:
# docs/notes/decoding.md#open
LITTLE, MANY = 2**20, 8


def by_blocks(
    call: SpanCall, pools: States, slots: Tensor, next_slots: Tensor, block_slots: Tensor, pieces: Pieces
) -> Tensor:
    """o [1, T, ...] of packed sequences, and states from slots [N] of the pools to next_slots [N], and to block_slots,
    as `pooled_prefill` has them."""
    order, numbers, tokens = _placed([pieces.order, pieces.numbers], pieces.tokens(), slots.device)
    state = read_all(pools, slots.index_select(0, order), call.dtype)
    call = call if tokens is None else call.over_time(lambda x: reordered(x, tokens))
    outputs, behind, count, length = [], [], len(pieces.starts), call.lead.shape[1]
    end = count * pieces.block
    if count:
        numbers_each = call.lead[:, 0].numel() * pieces.block * pieces.rounds[0]
        is_side_by_side = len(pools) == 1 and are_better_side_by_side(slots.device, numbers_each, len(pieces.rounds))
        run = side_by_side if is_side_by_side else in_series
        o, behind = run(call.cut(0, end).fold(count), state, pieces.rounds)
        outputs.append(o.flatten(0, 1)[None])
        state = _last(state, behind, pieces.rounds)
    if end < length or not count:
        o, state = call_from(call.cut(end, length), state, pieces.tail_offsets())
        outputs.append(o)
    if count:
        write_all(pools, block_slots.index_select(0, numbers), tuple(map(torch.cat, zip(*behind, strict=True))))
    write_all(pools, next_slots.index_select(0, order), state)
    o = torch.cat(outputs, 1)
    return o if tokens is None else torch.empty_like(o).index_copy_(1, tokens, o)


def call_from(call: SpanCall, state: States, cu_seqlens: Tensor | None) -> tuple[Tensor, States]:
    """The op's output from the states before its sequences, and those behind them."""
    given = state if len(state) > 1 else state[0]
    o, after = call.op(
        **call.tensors, **call.options, initial_state=given, output_final_state=True, cu_seqlens=cu_seqlens
    )
    return o, after if len(state) > 1 else (after,)


def read_all(pools: States, slots: Tensor, dtype: torch.dtype) -> States:
    return tuple(read_states(pool, slots, dtype) for pool in pools)


def write_all(pools: States, slots: Tensor, state: States) -> None:
    for pool, each in zip(pools, state, strict=True):
        write_states(pool, slots, each)


def reordered(x: Tensor, tokens: Tensor) -> Tensor:
    """x [1, T, ...] at these tokens. What is one number in memory along an axis stays so: delta rules take such keys in
    a wider dtype."""
    held = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    return (held if x.stride(1) == 0 else held.index_select(1, tokens)).expand(x.shape)


def are_better_side_by_side(device: torch.device, numbers: int, rounds: int) -> bool:
    """Whether a GPU would spend its time on starting one small round after the other. numbers: of a round's first
    argument."""
    return device.type == "cuda" and rounds > MANY and numbers <= LITTLE


def in_series(blocks: SpanCall, state: States, rounds: list[int]) -> tuple[Tensor, list[States]]:
    """o [M, block, ...] of blocks [M, block, ...], which lie round by round, and the states behind those of each round.

    state: before the blocks of the first round, and others behind them."""
    outputs, behind, done = [], [], 0
    for size in rounds:
        o, state = call_from(blocks.rows(done, done + size), tuple(x[:size] for x in state), None)
        outputs.append(o)
        behind.append(state)
        done += size
    return torch.cat(outputs), behind


def side_by_side(blocks: SpanCall, state: States, rounds: list[int]) -> tuple[Tensor, list[States]]:
    """As `in_series`, to rounding, of an op with one state: what each block does to a state, from these the state
    before each, then the op over all blocks at once. Each is computed twice, with a delta rule three times."""
    added, carry, _ = blocks.summary()
    before, behind, done, (state,) = [], [], 0, state
    for size in rounds:
        span = Summary(added[done : done + size], carry[done : done + size])
        before.append(state[:size])
        state = merge(Summary(state[:size]), span).added
        behind.append((state,))
        done += size
    return blocks.outputs(Summary(torch.cat(before)), None, final=False)[0], behind


def _last(state: States, behind: list[States], rounds: list[int]) -> States:
    """The states behind each sequence's last block, of one without a block those before it."""
    ends = [tuple(x[following:] for x in after) for after, following in zip(behind, [*rounds[1:], 0], strict=True)]
    parts = [*reversed(ends), tuple(x[rounds[0] :] for x in state)]
    return tuple(torch.cat([x for x in each if x.shape[0]]) for each in zip(*parts, strict=True))


def _placed(
    lists: list[list[int]], tokens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All on the device by one copy, for which the host waits."""
    parts = [torch.tensor(numbers, dtype=torch.int64) for numbers in lists]
    parts += [] if tokens is None else [tokens]
    first, second, *rest = torch.cat(parts).to(device).split([part.numel() for part in parts])
    return first, second, rest[0] if rest else None
