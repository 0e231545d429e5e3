"""The delta rule's gradients through the launches of hopper_delta_*.py: which tensors, in what order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.common.gluon_launch import aligned, launch, tiles
from holdfast.planner import Plan
from holdfast.planner.models.matrix_hopper_delta_gradients import REGISTERS
from holdfast.recurrences.definition import MatrixCall

from .hopper_delta_gradients import delta_gradients
from .hopper_delta_launch import entering, run_compose, run_prepare
from .hopper_delta_reverse import delta_reverse
from .hopper_delta_states import delta_states
from .hopper_delta_sweep import COLUMNS
from .hopper_launch import LAYOUT, TOKENS, Gates, tileable, ungroup, width_of

HALF = COLUMNS.value


@dataclass(frozen=True, slots=True)
class Kept:
    """Rounded states, transposed, [B, chunks * 64, H, K] each: of a chunk's V rows the first 64 in low."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(like: Tensor, chunks: int, heads: int, values: int) -> "Kept":
        batch, keys = like.shape[0], like.shape[3]
        low, high = (
            like.new_empty(batch, chunks * TOKENS, heads, keys) if used else None for used in (1, values > HALF)
        )
        return Kept(low, low if high is None else high)

    @staticmethod
    def within(dq: Tensor, dk: Tensor, dtype: torch.dtype) -> "Kept":
        """In two contiguous [B, T, H, K], T of whole chunks: a chunk's states are where its gradients will be."""
        if dq.dtype == dtype:
            return Kept(dq, dk)
        # a number of dq has room for two
        low, high = dq.view(dtype).chunk(2, -1)
        return Kept(low, high)

    def tiles(self) -> tuple:
        block = [1, TOKENS, 1, width_of(self.low.shape[3])]
        return tuple(tiles(x, block, LAYOUT) for x in (self.low, self.high))


def _rows(x: Tensor) -> object:
    """Tiles of 64 tokens and 64 columns."""
    return tiles(x, [1, TOKENS, 1, HALF], LAYOUT)


def _keys(x: Tensor) -> object:
    return tiles(x, [1, TOKENS, 1, width_of(x.shape[3])], LAYOUT)


def _inverse(a: Tensor) -> object:
    return tiles(a, [1, 1, TOKENS, TOKENS], LAYOUT)


def run_states(
    k: Tensor, v: Tensor, a: Tensor, u: Tensor, kept: Kept, gates: Gates, start: Tensor | None, plan: Plan
) -> None:
    """One launch of `delta_states`: u [B, T, H, V] and the states of every chunk.

    start: the states before the segments of plan["span"] chunks, float32 [B, segments, H, K, V], or None.
    """
    batch, length, heads, values = v.shape
    keys = k.shape[3]
    consumers = plan["columns"] // HALF
    arguments = (
        _keys(k), _rows(v), _inverse(a), _rows(u), *kept.tiles(), gates.g, gates.beta, start,
        length, heads, heads // k.shape[2], *gates.strides(), plan["span"],
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values, "CONSUMERS": consumers, "STAGES": plan["stages"]}
    types = (*gates.types(), k.dtype, width_of(keys), start is None)
    grid = (batch * heads, -(-values // plan["columns"]), -(-length // (plan["span"] * TOKENS)))
    launch(delta_states, grid, arguments, constants, 4, types)


def run_reverse(
    q: Tensor, k: Tensor, do: Tensor, a: Tensor, y: Tensor | None, kept: Kept | None, gates: Gates,
    start: Tensor | None, end: Tensor | None, part: tuple[int, int], columns: int, plan: Plan,
) -> None:  # fmt: skip
    """One launch of `delta_reverse` over a part of the sequence: its first chunk, and how many.

    start: dS after the part, float32 [B, H, K, V], or after each of the sequence's segments of plan["span"] chunks,
    [B, segments, H, K, V]; end: dS before the part, [B, H, K, V]. Without y and kept the part is the whole sequence,
    and end what its segments but the first add to dS, [B, segments - 1, H, K, V].
    """
    batch, length, heads, values = do.shape
    keys, lowest, count = k.shape[3], *part
    span = plan["span"]
    segments = start.shape[1] if start is not None and start.dim() == 5 else 1
    if kept is None:
        places, blocks = (None, None, None), end.shape[1]
    else:
        places, blocks = (_rows(y), *kept.tiles()), -(-count // span)
    arguments = (
        _keys(q), _keys(k), _rows(do), _inverse(a), *places, gates.g, gates.beta, start, end,
        length, heads, heads // k.shape[2], *gates.strides(), *part, span, lowest // span if segments > 1 else 0,
        segments, gates.scale,
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values, "CONSUMERS": columns // HALF, "STAGES": plan["reverse_stages"]}
    types = (*gates.types(), k.dtype, width_of(keys), kept is None, start is None, end is None)
    launch(delta_reverse, (batch * heads, -(-values // columns), blocks), arguments, constants, 4, types)


def entering_back(
    q: Tensor, k: Tensor, do: Tensor, a: Tensor, transition: Tensor, gates: Gates, last: Tensor | None, plan: Plan
) -> Tensor:
    """dS after each segment, float32 [B, segments, H, K, V].

    transition: as `entering` returns it. last: dS after all, or None for 0.
    """
    batch, length, heads, values = do.shape
    local = transition.new_empty(batch, transition.shape[1], heads, k.shape[3], values)
    whole = (0, -(-length // TOKENS))
    run_reverse(q, k, do, a, None, None, gates, last, local, whole, plan["state_columns"], plan)
    return run_compose(local, transition, last, True)


def run_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, u: Tensor, y: Tensor, states: Kept, after: Kept,
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], gates: Gates, part: tuple[int, int], warps: int,
) -> None:  # fmt: skip
    """One launch of `delta_gradients` over a part of the sequence. grads: dq, dk, dv, dg, dbeta."""
    batch, length, heads, values = v.shape
    keys = k.shape[3]
    dq, dk, dv, dg, dbeta = grads
    parts = dq.dtype == torch.float32
    outputs = (None, None) if parts else (_keys(dq), _keys(dk))
    arguments = (
        _keys(q), _keys(k), _rows(do), _rows(u), _rows(y), *states.tiles(), *after.tiles(), *outputs, _rows(dv),
        gates.g, gates.beta, v, after.low, after.high, dq, dk, dv, dg, dbeta,
        length, heads, heads // k.shape[2], *gates.strides(), *(x // 8 for x in v.stride()[:3]),
        after.low.shape[1] // TOKENS, part[0], gates.scale,
    )  # fmt: skip
    halves = width_of(values) // HALF
    constants = {"KEYS": keys, "VALUES": values, "HALVES": halves}
    wide = tuple(stride < 2**31 for stride in v.stride()[:3])
    types = (*gates.types(), k.dtype, width_of(keys), parts, dg is None, dbeta is None, *wide)
    launch(delta_gradients, (batch * heads, part[1], 1), arguments, constants, warps, types, REGISTERS[warps])


def backward(
    plan: Plan, call: MatrixCall, grad_o: Tensor | None, grad_final: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of (q, k, v, g, beta, norm_floor), None where the input is, and of the initial state if it is given."""
    q, k, v = (tileable(x) for x in call[:3])
    batch, length, heads, values = v.shape
    gates = Gates(call.g, call.beta, call.scale)
    grad_state = None
    if call.initial_state is not None:
        grad_state = torch.empty_like(call.initial_state, memory_format=torch.contiguous_format)
    grads = {
        name: torch.empty_like(x, memory_format=torch.contiguous_format)
        for name in ("q", "k", "v", "g", "beta")
        if (x := getattr(call, name)) is not None
    }
    if v.numel() == 0:
        for x in grads.values():
            x.zero_()
        if grad_state is not None:
            grad_state.zero_() if grad_final is None else grad_state.copy_(grad_final)
        return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
    do = torch.zeros_like(v) if grad_o is None else tileable(grad_o)
    dg, dbeta = (
        None if x is None else x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        for x in (grads.get("g"), grads.get("beta"))
    )
    start = aligned(call.initial_state)

    grouped = heads != k.shape[2]
    per_head = (batch, length, heads, k.shape[3])
    # heads of a group are added in float32: rounded first, their errors would be too
    dq, dk = (k.new_empty(per_head, dtype=torch.float32) if grouped else grads[name] for name in "qk")

    a = run_prepare(k, heads, gates)
    chunks = -(-length // TOKENS)
    # whole chunks' states fit where their gradients of q and k will be, and U where v's will be
    states = Kept.within(dq, dk, k.dtype) if length % TOKENS == 0 else Kept.of(k, chunks, heads, values)
    span, window = plan["span"], -(-chunks // plan["windows"])
    first, carry = aligned(grad_final), grad_state
    if span < chunks:
        window = -(-window // span) * span
        start, transition = entering(k, v, a, gates, plan["state_columns"], plan["stages"], span, start)
        first = entering_back(q, k, do, a, transition, gates, first, plan)
    elif chunks > window:
        if carry is None:
            carry = v.new_empty(batch, heads, k.shape[3], values, dtype=torch.float32)
        if first is None:
            # zeros, so that every window runs the same compiled kernel
            first = carry.zero_()
    run_states(k, v, a, grads["v"], states, gates, start, plan)

    y = v.new_empty(batch, window * TOKENS, heads, values)
    after = Kept.of(k, window, heads, values)
    warps = plan["grad_warps"]
    # the last window first; the one at the sequence's end may be shorter
    for lowest in reversed(range(0, chunks, window)):
        part = (lowest, min(window, chunks - lowest))
        run_reverse(q, k, do, a, y, after, gates, first, carry, part, plan["columns"], plan)
        run_gradients(q, k, v, do, grads["v"], y, states, after, (dq, dk, grads["v"], dg, dbeta), gates, part, warps)
        if span >= chunks:
            first = carry
    for name, found in (("g", dg), ("beta", dbeta)):
        if found is not None and found is not grads[name]:
            grads[name].copy_(found)
    if grouped:
        for name, parts in (("q", dq), ("k", dk)):
            grads[name].copy_(ungroup(parts, k))
    return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
