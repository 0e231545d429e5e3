"""pooled_prefill: prompts packed along the tokens, on a pool of states, which may stay behind every block of tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.varlen import sequence_bounds
from holdfast.planner.choices import no_choice
from holdfast.recurrences import RECURRENCES
from holdfast.recurrences.scalars import flag, integer
from holdfast.recurrences.torch_private import tree_leaves

from .autocast import without_autocast
from .check import check_cu_seqlens, name_of, prepare
from .derivatives import refuse_forward_mode
from .prefill_blocks import States, by_blocks, call_from, read_all, write_all
from .prefill_pieces import pieces_of
from .slot_checks import check_index, check_mlstm_pools, check_pool, pool_dtypes
from .span_call import LINEAR, SpanCall, parameters_of

_OWN = ("initial_state", "output_final_state", "cu_seqlens", "backend")


@torch.no_grad()
def pooled_prefill(
    op: str,
    arguments: Mapping[str, Any],
    pool: Tensor | tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    cu_seqlens: Tensor,
    next_slots: Tensor | None = None,
    block: int | None = None,
    block_slots: Tensor | None = None,
    keys_last: bool = False,
    backend: str | None = None,
) -> Tensor:
    """What `op` returns for packed sequences whose states are read from a pool, and written to it, at blocks' ends too.

    With block the op is called block after block, with the same block of all sequences as a batch, and then with what
    is left behind their blocks. Where that would be many small calls of a GPU, blocks of any op but "mlstm" are
    computed side by side: what each does to a state (`holdfast.parallel.summary`), from that the state before each,
    then their outputs; so a block is computed twice, with a delta rule three times. Either takes some three states in
    float32 a block while it runs.

    All states are read before the first is written. Slots and the pool are not read on the host; the offsets are, once.
    Gradients are not recorded.

    Args:
        op: a recurrence of the matrix or of the diagonal family.
        arguments: the op's arguments by name, of sequences packed along T, [1, T, ...], and options such as scale; no
            initial_state.
        pool: [S, H, K, V], or [S, H, V, K] with keys_last; of "mlstm" the tuple (C, n [S, H, K], m [S, H]) with C like
            that; of a diagonal recurrence [S, D]. float32, bfloat16 or float16 (float64 for float64 inputs), m float32
            at least, with any strides. Written to. A state is rounded to its pool's dtype where it is written, and not
            between the blocks of one call.
        slots: int32 [N], where the state before each sequence's first token is. A number that is none of a slot, such
            as -1, is the zero state. Several sequences may read one slot.
        cu_seqlens: int32 or int64 [N + 1], the sequences' offsets along T, on any device.
        next_slots: int32 [N], where the state behind each sequence's last token goes, of an empty sequence the one that
            was read; by default where it was. Where that is no slot, nothing is written.
        block: tokens a block, counted from each sequence's first token in this call; together with block_slots. A
            sequence of L tokens has L // block complete ones. Kernels take multiples of 64 fastest.
        block_slots: int32 [sum over sequences of L // block], where the state behind each complete block goes: those of
            the first sequence in their order, then those of the second, and so on. Where that is no slot, such as -1,
            nothing is written. A sequence that ends with a block has its last state in both places.
        keys_last: whether K is a state's last axis.
        backend: as in the op.

    next_slots and block_slots may name a slot once in all, which is not checked: the host does not see them. Of several
    states for one slot any may be there in the end.

    Returns:
        o as the op returns it, [1, T, ...].

    Raises:
        ValueError, TypeError: for an unknown op or argument, for an argument of the wrong shape, dtype or device, named
            in the message; for block without block_slots; for a backend that is unknown or cannot serve the call.
        RuntimeError: while a CUDA graph is captured, with block.
    """
    call = _call(op, arguments, cu_seqlens, backend)
    pools = _pools(call, pool, flag("keys_last", keys_last))
    refuse_forward_mode("pooled_prefill", tree_leaves((call.tensors, call.options, pools)))
    check_index("slots", slots, call.lead, [cu_seqlens.numel() - 1])
    next_slots = slots if next_slots is None else next_slots
    check_index("next_slots", next_slots, call.lead, [cu_seqlens.numel() - 1])
    if (block is None) != (block_slots is None):
        missing, other = ("block", "block_slots") if block is None else ("block_slots", "block")
        raise ValueError(f"{missing}: expected one beside {other}; got None")
    with without_autocast(call.lead):
        if block is None:
            o, behind = call_from(call, read_all(pools, slots, call.dtype), cu_seqlens)
            write_all(pools, next_slots, behind)
            return o
        bounds = sequence_bounds(cu_seqlens, call.lead.shape[1])
        pieces = pieces_of(bounds, _length(block))
        check_index("block_slots", block_slots, call.lead, [len(pieces.starts)])
        return by_blocks(call, pools, slots, next_slots, block_slots, pieces)


def _pools(call: SpanCall, pool: Any, keys_last: bool) -> States:
    """What the op's states are read from and written to, checked, with V last."""
    if call.name == "mlstm":
        C, n, m = check_mlstm_pools(pool, call.tensors["k"], call.tensors["v"], keys_last)
        return C.mT if keys_last else C, n, m
    state = list(call.start(0).added.shape[1:])
    if keys_last:
        if len(state) == 1:
            raise ValueError(f"keys_last: expected False, as a state of {call.name} has no keys; got True")
        state = [state[0], state[2], state[1]]
    check_pool("pool", pool, call.lead, ["slots", *state], pool_dtypes(call.lead))
    return (pool.mT if keys_last else pool,)


def _call(op: str, arguments: Mapping[str, Any], cu_seqlens: Any, backend: str | None) -> SpanCall:
    """The op's call, checked."""
    if op not in LINEAR:
        raise ValueError(no_choice("op", tuple(LINEAR), op))
    recurrence = RECURRENCES[op]
    for name in arguments:
        if name in _OWN:
            raise TypeError(f"arguments: expected no {name}, which is pooled_prefill's own; got one")
        if name not in parameters_of(op):
            raise TypeError(f"arguments: expected names that {op} takes; got {name!r}")
    tensors = {name: arguments.get(name) for name in recurrence.arguments if name != "initial_state"}
    lead = next(iter(tensors.values()))
    check_cu_seqlens(cu_seqlens, lead.shape[0] if isinstance(lead, Tensor) and lead.dim() else 1)
    options = {name: x for name, x in arguments.items() if name not in tensors}
    name_of(backend)
    return SpanCall.of(recurrence, prepare(recurrence, cu_seqlens, tensors), options | {"backend": backend})


def _length(block: Any) -> int:
    if integer("block", block) < 1:
        raise ValueError(f"block: expected 1 or more tokens; got {block}")
    return block
