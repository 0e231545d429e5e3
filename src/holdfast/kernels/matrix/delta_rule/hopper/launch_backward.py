"""The delta rule's gradients through the launches of this folder: which tensors, in what order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.lib.triton.group_sum import sum_over_groups
from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, dtype_or_none
from holdfast.kernels.matrix.delta_rule.triton.segment_dstates import pull_back
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import aligned, tileable, tiles, width_of
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall

from .backward import delta_adjoint
from .backward_states import delta_states
from .launch_forward import (
    blocks_of,
    chunks_of,
    entering,
    local_of,
    run_compose,
    run_prepare,
    run_sweep,
    sequences_in_segments,
)
from .producers import COLUMNS

HALF = COLUMNS.value
# columns of the state that a program of `pull_back` has
PULLED = 128


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

    def tiles(self, columns: int) -> tuple:
        return tuple(tiles(x, [1, TOKENS, 1, columns], TILE_LAYOUT) for x in (self.low, self.high))


def _rows(x: Tensor) -> object:
    """Tiles of 64 tokens and 64 columns."""
    return tiles(x, [1, TOKENS, 1, HALF], TILE_LAYOUT)


def _whole(x: Tensor) -> object:
    """Tiles of 64 tokens and all columns."""
    return tiles(x, [1, TOKENS, 1, width_of(x.shape[3])], TILE_LAYOUT)


def _inverse(a: Tensor) -> object:
    return tiles(a, [1, 1, TOKENS, TOKENS], TILE_LAYOUT)


def run_states(
    k: Tensor, v: Tensor, a: Tensor, u: Tensor, kept: Kept, gates: DecayAndBeta, start: Tensor | None, plan: Plan,
    cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of `delta_states`: u [B, T, H, V] and the states of every chunk.

    start: the states before the segments of plan["span"] chunks, float32 [B, segments, H, K, V], or None. cu_seqlens
    [N + 1]: where packed sequences begin and end; u is then [1, chunks * 64, H, V], and start [1, places, H, K, V].
    """
    batch, length, heads, values = v.shape
    keys, span = k.shape[3], plan["span"]
    consumers, sequences = plan["columns"] // HALF, sequences_in_segments(length, span, cu_seqlens)
    arguments = (
        _whole(k), _rows(v), _inverse(a), _rows(u), *kept.tiles(width_of(keys)), gates.g, gates.beta, start, cu_seqlens,
        sequences, length, heads, heads // k.shape[2], *gates.strides(), span,
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values, "CONSUMERS": consumers, "STAGES": plan["stages"]}
    types = (*gates.types(), k.dtype, width_of(keys), start is None, sequences is None, dtype_or_none(cu_seqlens))
    blocks, segments = blocks_of(batch, length, span, cu_seqlens)
    grid = (blocks * heads, -(-values // plan["columns"]), segments)
    overlaps = start is None or (sequences is None and segments == 1)
    launch(delta_states, grid, arguments, constants, 4, types, None, overlaps)


def run_pull_back(w: Tensor, do: Tensor, local: Tensor, span: int, cu_seqlens: Tensor | None = None) -> None:
    """One launch of `pull_back`: local [B, segments, H, K, V] of w [B, T, H, K] and do [B, T, H, V]."""
    batch, length, heads, keys = w.shape
    values = do.shape[3]
    blocks, segments = blocks_of(batch, length, span, cu_seqlens)
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    constants = {"KEYS": keys, "VALUES": values, "WIDE": width_of(keys), "BLOCK": PULLED}
    numbers = (sequences, length, heads, span, *do.stride()[:3])
    grid = (blocks * heads, -(-values // PULLED), segments)
    with torch.cuda.device_of(w):
        triton_launch.launch(pull_back, grid, (w, do, local, cu_seqlens), numbers, constants, 8)


def entering_both(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, a: Tensor, w: Tensor, gates: DecayAndBeta, start: Tensor | None,
    last: Tensor | None, plan: Plan, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state before each segment and the gradient of that after it, float32 [B, segments, H, K, V].

    start: the state before the sequence, and last: dS after it, or None for 0. w: room for [B, T, H, K] in k's dtype.
    cu_seqlens [N + 1]: where packed sequences begin and end; start and last are then [N, H, K, V], and what is of
    segments [1, places, H, K, V].
    """
    (length, heads, values), span = v.shape[1:], plan["span"]
    columns, stages = plan["state_columns"], plan["stages"]
    transition = local_of(k, heads, k.shape[3], True, span, cu_seqlens)
    run_sweep(q, k, None, a, w, gates, None, None, transition, columns, stages, span, cu_seqlens)
    local = local_of(k, heads, values, True, span, cu_seqlens)
    run_pull_back(w, do, local, span, cu_seqlens)
    last = run_compose(local, transition, last, True, length, span, cu_seqlens)
    return entering(k, v, a, gates, columns, stages, span, start, transition, cu_seqlens), last


def run_adjoint(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, a: Tensor, u: Tensor, states: Kept, gates: DecayAndBeta,
    start: Tensor | None, end: Tensor | None, grads: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    span: int, cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of `delta_adjoint`. grads: dq, dk, dv, dg, dbeta.

    start: dS after each segment of `span` chunks, float32 [B, segments, H, K, V], or None for 0; end: dS before the
    sequence, [B, H, K, V], or None. cu_seqlens [N + 1]: where packed sequences begin and end; start and end are then
    [N, H, K, V], of their segments [1, places, H, K, V], and u is [1, chunks * 64, H, V].
    """
    batch, length, heads, values = v.shape
    keys, sequences = k.shape[3], sequences_in_segments(length, span, cu_seqlens)
    dq, dk, dv, dg, dbeta = grads
    parts = dq.dtype == torch.float32
    outputs = (None, None) if parts else (_whole(dq), _whole(dk))
    low, high = states.tiles(HALF)
    arguments = (
        _whole(q), _whole(k), _whole(do), _inverse(a), _whole(u), low, high, *outputs, _whole(dv),
        gates.g, gates.beta, v, start, end, dq, dk, dv, dg, dbeta, cu_seqlens,
        sequences, length, heads, heads // k.shape[2], *gates.strides(), *(x // 8 for x in v.stride()[:3]), span,
        gates.scale,
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values}
    wide = tuple(stride < 2**31 for stride in v.stride()[:3])
    optional = (start is None, end is None, dg is None, dbeta is None, sequences is None)
    types = (
        *gates.types(),
        k.dtype,
        width_of(keys),
        width_of(values),
        parts,
        *optional,
        *wide,
        dtype_or_none(cu_seqlens),
    )
    blocks, segments = blocks_of(batch, length, span, cu_seqlens)
    grid = (blocks * heads, segments, 1)
    launch(delta_adjoint, grid, arguments, constants, width_of(values) // 16, types)


def backward(
    plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of the initial state if it is given."""
    q, k, v = (tileable(x) for x in call[:3])
    batch, length, heads, values = v.shape
    gates = DecayAndBeta(call.g, call.beta, call.scale)
    cu_seqlens = varlen.on_device(cu_seqlens, length, v.device)
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

    a = run_prepare(k, heads, gates, cu_seqlens)
    chunks = chunks_of(length, cu_seqlens)
    # whole chunks' states fit where their gradients of q and k will be, and U where v's will be
    is_whole = cu_seqlens is None and length % TOKENS == 0
    states = Kept.within(dq, dk, k.dtype) if is_whole else Kept.of(k, chunks, heads, values)
    u = grads["v"] if cu_seqlens is None else v.new_empty(1, chunks * TOKENS, heads, values)
    span, last = plan["span"], aligned(grad_final)
    if span * TOKENS < length:
        # where dq will be, unless that is in another dtype
        w = dq if dq.dtype == k.dtype else k.new_empty(per_head)
        start, last = entering_both(q, k, v, do, a, w, gates, start, last, plan, cu_seqlens)
    run_states(k, v, a, u, states, gates, start, plan, cu_seqlens)
    found = (dq, dk, grads["v"], dg, dbeta)
    run_adjoint(q, k, v, do, a, u, states, gates, last, grad_state, found, span, cu_seqlens)
    for name, found in (("g", dg), ("beta", dbeta)):
        if found is not None and found is not grads[name]:
            grads[name].copy_(found)
    if grouped:
        sum_over_groups(dq, dk, grads["q"], grads["k"])
    return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
