"""The delta rule's backward pass on Hopper: its launches, which tensors they take, and in what order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.lib.triton.group_sum import sum_over_groups
from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, dtype_or_none
from holdfast.kernels.matrix.delta_rule.triton.segment_dstates import delta_rule_segment_dstates
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import aligned, for_tma, round_up_columns, tiles
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall

from .backward import delta_rule_bwd
from .backward_states import delta_rule_bwd_states
from .launch_forward import (
    StateIO,
    Tiling,
    blocks_of,
    chunks_of,
    run_chunk_inverse,
    run_forward,
    run_segment_scan,
    segment_buffer,
    segment_initial_states,
    sequences_in_segments,
)
from .producers import COLUMNS

HALF = COLUMNS.value
# columns of the state that a program of `delta_rule_segment_dstates` has
SUMMED = 128


@dataclass(frozen=True, slots=True)
class SavedStates:
    """Rounded states, transposed, [B, chunks * 64, H, K] each: of a chunk's V rows the first 64 are in low."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(like: Tensor, chunks: int, heads: int, values: int) -> "SavedStates":
        batch, keys = like.shape[0], like.shape[3]
        low, high = (
            like.new_empty(batch, chunks * TOKENS, heads, keys) if used else None for used in (1, values > HALF)
        )
        return SavedStates(low, low if high is None else high)

    @staticmethod
    def within(dq: Tensor, dk: Tensor, dtype: torch.dtype) -> "SavedStates":
        """Return states in two contiguous [B, T, H, K], T whole chunks: a chunk's are where its gradients will be."""
        if dq.dtype == dtype:
            return SavedStates(dq, dk)
        # a number of dq has room for two
        low, high = dq.view(dtype).chunk(2, -1)
        return SavedStates(low, high)

    def tiles(self, columns: int) -> tuple:
        return tuple(tiles(x, [1, TOKENS, 1, columns], TILE_LAYOUT) for x in (self.low, self.high))


@dataclass(frozen=True, slots=True)
class Residuals:
    """What the launches before leave to the gradients: the inverses, U and the states of all chunks.

    initial: the states before the segments, float32 [B, segments, H, K, V], or None.
    """

    a: Tensor
    u: Tensor
    states: SavedStates
    initial: Tensor | None


def _narrow(x: Tensor) -> object:
    """Return the descriptor of tiles of 64 tokens and 64 columns."""
    return tiles(x, [1, TOKENS, 1, HALF], TILE_LAYOUT)


def _wide(x: Tensor) -> object:
    """Return the descriptor of tiles of 64 tokens and all columns."""
    return tiles(x, [1, TOKENS, 1, round_up_columns(x.shape[3])], TILE_LAYOUT)


def _inverse(a: Tensor) -> object:
    return tiles(a, [1, 1, TOKENS, TOKENS], TILE_LAYOUT)


def run_states(
    k: Tensor, v: Tensor, saved: Residuals, gates: DecayAndBeta, plan: Plan, cu_seqlens: Tensor | None = None
) -> None:  # fmt: skip
    """Launch `delta_rule_bwd_states`: U [B, T, H, V] and the states of every chunk, to saved.

    Segments are of plan["segment_chunks"] each. cu_seqlens [N + 1]: where packed sequences begin and end; U is then
    [1, chunks * 64, H, V], and the initial states are [1, places, H, K, V].
    """
    start = saved.initial
    batch, length, heads, values = v.shape
    keys, segment_chunks = k.shape[3], plan["segment_chunks"]
    wide = round_up_columns(keys)
    warpgroups, sequences = plan["columns"] // HALF, sequences_in_segments(length, segment_chunks, cu_seqlens)
    arguments = (
        _wide(k), _narrow(v), _inverse(saved.a), _narrow(saved.u), *saved.states.tiles(wide), gates.g, gates.beta,
        start, cu_seqlens, sequences, length, heads, heads // k.shape[2], *gates.strides(), segment_chunks,
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values, "MMA_WARPGROUPS": warpgroups, "STAGES": plan["stages"]}
    types = (*gates.types(), k.dtype, wide, start is None, sequences is None, dtype_or_none(cu_seqlens))
    blocks, segments = blocks_of(batch, length, segment_chunks, cu_seqlens)
    grid = (blocks * heads, -(-values // plan["columns"]), segments)
    pdl = start is None or (sequences is None and segments == 1)
    launch(delta_rule_bwd_states, grid, arguments, constants, 4, types, None, pdl)


def run_segment_dstates(
    w: Tensor, do: Tensor, local: Tensor, segment_chunks: int, cu_seqlens: Tensor | None = None
) -> None:
    """Launch `delta_rule_segment_dstates`: local [B, segments, H, K, V] from w [B, T, H, K] and do [B, T, H, V]."""
    batch, length, heads, keys = w.shape
    values = do.shape[3]
    blocks, segments = blocks_of(batch, length, segment_chunks, cu_seqlens)
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    constants = {"KEYS": keys, "VALUES": values, "WIDE": round_up_columns(keys), "BLOCK": SUMMED}
    numbers = (sequences, length, heads, segment_chunks, *do.stride()[:3])
    grid = (blocks * heads, -(-values // SUMMED), segments)
    with torch.cuda.device_of(w):
        triton_launch.launch(delta_rule_segment_dstates, grid, (w, do, local, cu_seqlens), numbers, constants, 8)


def segment_boundary_states(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, a: Tensor, w: Tensor, gates: DecayAndBeta, boundary_states: StateIO,
    plan: Plan, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the state before each segment and the gradient of the one after it, float32 [B, segments, H, K, V].

    boundary_states: before the sequence, and dS after it, or None for 0. w: room for [B, T, H, K] in k's dtype.
    cu_seqlens [N + 1]: where packed sequences begin and end; boundary states are then [N, H, K, V], and segments have
    places, [1, places, H, K, V].
    """
    (length, heads, values), chunks = v.shape[1:], plan["segment_chunks"]
    tiling = Tiling(plan["state_columns"], plan["stages"], chunks)
    transition = segment_buffer(k, heads, k.shape[3], True, chunks, cu_seqlens)
    run_forward(q, k, None, a, w, gates, StateIO(transition=transition), tiling, cu_seqlens)
    local = segment_buffer(k, heads, values, True, chunks, cu_seqlens)
    run_segment_dstates(w, do, local, chunks, cu_seqlens)
    after = run_segment_scan(local, transition, boundary_states.end, True, length, chunks, cu_seqlens)
    return segment_initial_states(k, v, a, gates, tiling, boundary_states.start, transition, cu_seqlens), after


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Residuals, gates: DecayAndBeta, dstates: StateIO,
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], segment_chunks: int,
    cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `delta_rule_bwd`. grads: dq, dk, dv, dg, dbeta.

    dstates: dS after each segment, float32 [B, segments, H, K, V], or None for 0, at the start; at the end dS before
    the sequence, [B, H, K, V], or None. cu_seqlens [N + 1]: where packed sequences begin and end; these are then
    [N, H, K, V], of segments [1, places, H, K, V], and U is [1, chunks * 64, H, V].
    """
    batch, length, heads, values = v.shape
    keys, sequences = k.shape[3], sequences_in_segments(length, segment_chunks, cu_seqlens)
    dq, dk, dv, dg, dbeta = grads
    parts = dq.dtype == torch.float32
    chunks = -(-length // TOKENS)
    # packed sequences are as short as cu_seqlens says
    may_be_one_chunk = cu_seqlens is not None or chunks % segment_chunks == 1 % segment_chunks
    initial = saved.initial if may_be_one_chunk and dg is not None and dstates.start is not None else None
    outputs = (None, None) if parts else (_wide(dq), _wide(dk))
    low, high = saved.states.tiles(HALF)
    arguments = (
        _wide(q), _wide(k), _wide(do), _inverse(saved.a), _wide(saved.u), low, high, *outputs, _wide(dv),
        gates.g, gates.beta, v, dstates.start, dstates.end, initial, dq, dk, dv, dg, dbeta, cu_seqlens,
        sequences, length, heads, heads // k.shape[2], *gates.strides(), *(x // 8 for x in v.stride()[:3]),
        segment_chunks, gates.scale,
    )  # fmt: skip
    constants = {"KEYS": keys, "VALUES": values}
    wide = tuple(stride < 2**31 for stride in v.stride()[:3])
    optional = (
        dstates.start is None,
        dstates.end is None,
        initial is None,
        dg is None,
        dbeta is None,
        sequences is None,
    )
    types = (
        *gates.types(),
        k.dtype,
        round_up_columns(keys),
        round_up_columns(values),
        parts,
        *optional,
        *wide,
        dtype_or_none(cu_seqlens),
    )
    blocks, segments = blocks_of(batch, length, segment_chunks, cu_seqlens)
    grid = (blocks * heads, segments, 1)
    launch(delta_rule_bwd, grid, arguments, constants, round_up_columns(values) // 16, types)


def backward(
    plan: Plan,
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    a: Tensor | None = None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of an initial state.

    a: the chunks' inverses, if they are known: see `run_chunk_inverse`.
    """
    q, k, v = (for_tma(x) for x in call[:3])
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
    do = torch.zeros_like(v) if grad_o is None else for_tma(grad_o)
    dg, dbeta = (
        None if x is None else x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        for x in (grads.get("g"), grads.get("beta"))
    )
    start = aligned(call.initial_state)

    grouped = heads != k.shape[2]
    per_head = (batch, length, heads, k.shape[3])
    # heads of a group are added in float32: rounded first, their errors would be too
    dq, dk = (k.new_empty(per_head, dtype=torch.float32) if grouped else grads[name] for name in "qk")

    if a is None:
        a = run_chunk_inverse(k, heads, gates, cu_seqlens)
    chunks = chunks_of(length, cu_seqlens)
    # whole chunks' states fit where their gradients of q and k will be, and U where v's will be
    is_whole = cu_seqlens is None and length % TOKENS == 0
    states = SavedStates.within(dq, dk, k.dtype) if is_whole else SavedStates.of(k, chunks, heads, values)
    u = grads["v"] if cu_seqlens is None else v.new_empty(1, chunks * TOKENS, heads, values)
    segment_chunks, after = plan["segment_chunks"], aligned(grad_final)
    if segment_chunks * TOKENS < length:
        # where dq will be, unless that is in another dtype
        w = dq if dq.dtype == k.dtype else k.new_empty(per_head)
        boundary_states = StateIO(start, after)
        start, after = segment_boundary_states(q, k, v, do, a, w, gates, boundary_states, plan, cu_seqlens)
    saved = Residuals(a, u, states, start)
    run_states(k, v, saved, gates, plan, cu_seqlens)
    found = (dq, dk, grads["v"], dg, dbeta)
    run_backward(q, k, v, do, saved, gates, StateIO(after, grad_state), found, segment_chunks, cu_seqlens)
    for name, found in (("g", dg), ("beta", dbeta)):
        if found is not None and found is not grads[name]:
            grads[name].copy_(found)
    if grouped:
        sum_over_groups(dq, dk, grads["q"], grads["k"])
    return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
