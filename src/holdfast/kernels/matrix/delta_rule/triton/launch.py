"""The delta rule's launches in Triton, one pass each: which tensors, in what order."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.triton.group_sum import sum_over_groups
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.planner.models.matrix.delta_rule.triton import gradient_parts, padded, states_fit_gradients
from holdfast.recurrences.definition import MatrixCall

from .chunk_grads import delta_rule_triton_chunk_grads
from .chunk_inverse import delta_rule_triton_chunk_inverse
from .states import delta_rule_triton_dstates, delta_rule_triton_fwd


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _tokenwise(x: Tensor) -> Tensor:
    """x itself if the kernels can read it, else a copy: the last axis dense, 64 tokens within 32 bits."""
    return x if x.stride(-1) == 1 and 64 * x.stride(1) < 2**31 else x.contiguous()


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32).contiguous()


def _sums_are_wide(dtype: torch.dtype) -> dict[str, object]:
    """The constant of kernels for sums of log decays: float64 beside inputs of float32 or float16."""
    # in float32 sums that hold a decay of zero resolve others to 1e-3
    return {"WIDE": dtype != torch.bfloat16}


def prepare(
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    heads: int,
    chunk: int,
    cu_seqlens: Tensor | None,
    *,
    warps: int = 4,
) -> Tensor:
    """Return M^-1 - I of each chunk, [B, T, H, chunk] in k's dtype; a row is a token.

    k [B, T, Hq, K], its last axis dense. g, beta [B, T, H], float32 and contiguous, or None. M = I + diag(beta) N, with
    N(t, s) = exp(g_{s+1} + ... + g_t) k_t . k_s for s < t in one chunk; chunks count from each sequence's first token.
    """
    batch, length, group, width = k.shape
    a = k.new_empty(batch, length, heads, chunk)
    sequences, places = _places(k, chunk, cu_seqlens)
    if a.numel() == 0:
        return a
    constants = {
        "GROUP": heads // group,
        "WIDTH": width,
        "BLOCK_K": padded(width),
        "CHUNK": chunk,
    } | _sums_are_wide(k.dtype)
    numbers = (length, heads, sequences, _ceil(length, chunk), *k.stride()[:3])
    launch(delta_rule_triton_chunk_inverse, (places * heads,), (k, g, beta, a, cu_seqlens), numbers, constants, warps)
    return a


def _places(x: Tensor, chunk: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Return how many sequences there are, and places for all of their chunks."""
    batch, length = x.shape[:2]
    if cu_seqlens is None:
        return batch, batch * _ceil(length, chunk)
    sequences = cu_seqlens.shape[0] - 1
    return sequences, length // chunk + sequences


class Slots(NamedTuple):
    """Memory for rounded, transposed states, a slot a chunk and head: rows below `chunk` in low, the others in high.

    strides: from one chunk, head and row to the next. in_grads: whether it is the gradients of q and k.
    """

    low: Tensor
    high: Tensor
    strides: tuple[int, int, int]
    in_grads: bool

    @staticmethod
    def of(like: Tensor, places: int, heads: int, width: int, columns: int, chunk: int) -> "Slots":
        slots = like.new_empty(places, heads, columns, width)
        high = slots[:, :, min(chunk, columns) :]
        return Slots(
            slots, high if columns > chunk else slots, (heads * columns * width, columns * width, width), False
        )

    @staticmethod
    def within(dq: Tensor, dk: Tensor, dtype: torch.dtype, chunk: int) -> "Slots":
        """Return slots in two contiguous [B, T, H, K]: a chunk's slot is where its gradients will be written."""
        heads, width = dq.shape[2:]
        if dq.dtype == dtype:
            return Slots(dq, dk, (chunk * heads * width, width, heads * width), True)
        # a number of dq has room for two
        low = dq.view(dtype)
        return Slots(low, low[..., width:], (2 * chunk * heads * width, 2 * width, 2 * heads * width), True)


@dataclass(frozen=True)
class DeltaPasses:
    """A call as the kernels take it. places: how many chunks have room."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor | None
    scale: float
    cu_seqlens: Tensor | None
    sequences: int
    places: int
    # whether states may be saved where gradients will be written
    shares_memory: ClassVar[bool] = True

    @classmethod
    def of(cls, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> Self:
        """Raises ValueError for offsets that do not rise from 0 to T; while a CUDA graph is captured they go unread."""
        cu_seqlens = varlen.on_device(cu_seqlens, call.v.shape[1], call.v.device)
        q, k, v = (cls.read(x) for x in call[:3])
        state = None if call.initial_state is None else call.initial_state.contiguous()
        counts = _places(v, plan["chunk"], cu_seqlens)
        return cls(plan, q, k, v, _rows(call.g), _rows(call.beta), state, call.scale, cu_seqlens, *counts)

    @staticmethod
    def read(x: Tensor) -> Tensor:
        """Return x [B, T, H, D] as the kernels of the states read it."""
        return _tokenwise(x)

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    def constants(self, block: int) -> dict[str, int]:
        width, columns = self.k.shape[3], self.v.shape[3]
        return {
            "GROUP": self.heads // self.q.shape[2],
            "WIDTH": width,
            "COLUMNS": columns,
            "BLOCK_K": padded(width),
            "BLOCK_V": block,
            "CHUNK": self.plan["chunk"],
        }

    def sums_are_wide(self) -> dict[str, object]:
        return _sums_are_wide(self.v.dtype)

    def prepare(self) -> Tensor:
        chunk, warps = self.plan["chunk"], self.plan["prepare_warps"]
        return prepare(self.k, self.g, self.beta, self.heads, chunk, self.cu_seqlens, warps=warps)

    def forward(self, a: Tensor, out: Tensor | None, last: Tensor | None, slots: Slots | None) -> None:
        """Launch `delta_rule_triton_fwd`."""
        block = self.plan["columns"]
        low, high, strides = (None, None, (0, 0, 0)) if slots is None else slots[:3]
        tensors = (self.q, self.k, self.v, a, self.g, self.beta, out, self.state, last, low, high, self.cu_seqlens)
        numbers = (
            self.v.shape[1], self.heads, self.scale,
            *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *strides,
        )  # fmt: skip
        blocks = (_ceil(self.v.shape[3], block) * self.heads * self.sequences,)
        constants = self.constants(block) | {"STAGES": self.plan["stages"]} | self.sums_are_wide()
        launch(delta_rule_triton_fwd, blocks, tensors, numbers, constants, self.plan["warps"])

    def reverse(
        self, do: Tensor, a: Tensor, first: Tensor | None, last: Tensor | None, slots: Slots, window: tuple[int, int]
    ) -> None:
        """Launch `delta_rule_triton_dstates`. window: its first chunk, and how many."""
        block = self.plan["columns"]
        tensors = (self.q, self.k, do, a, self.g, self.beta, first, last, *slots[:2], self.cu_seqlens)
        numbers = (
            self.v.shape[1], self.heads, self.scale, *window,
            *self.q.stride()[:3], *self.k.stride()[:3], *do.stride()[:3], *slots.strides,
        )  # fmt: skip
        blocks = (_ceil(self.v.shape[3], block) * self.heads * self.sequences,)
        constants = self.constants(block) | {"STAGES": self.plan["reverse_stages"]} | self.sums_are_wide()
        launch(delta_rule_triton_dstates, blocks, tensors, numbers, constants, self.plan["warps"])

    def gradients(
        self,
        do: Tensor,
        a: Tensor,
        states: Slots,
        after: Slots,
        dfinal: Tensor | None,
        grads: tuple[Tensor | None, ...],
        window: tuple[int, int],
    ) -> None:
        """Launch `delta_rule_triton_chunk_grads`. grads: dq, dk, dv, dg of each part of K's columns, dbeta.

        after: slots of memory of their own, of the gradients of the states that leave the window's chunks. dfinal:
        those of the final states, contiguous, or None.
        """
        is_short = self.cu_seqlens is not None or self.v.shape[1] <= self.plan["chunk"]
        is_exact = is_short and self.state is not None and dfinal is not None
        boundary_states = (self.state, dfinal) if is_exact else (None, None)
        tensors = (
            self.q, self.k, self.v, do, a, self.g, self.beta, states.low, after.low, *boundary_states, *grads,
            self.cu_seqlens,
        )  # fmt: skip
        numbers = (
            self.v.shape[1], self.heads, self.sequences, self.scale, window[0],
            *(number for x in (self.q, self.k, self.v, do) for number in x.stride()[:3]),
        )  # fmt: skip
        parts = gradient_parts(self.k.shape[3])
        places = self.places if self.cu_seqlens is not None else self.sequences * window[1]
        constants = self.constants(self.plan["grad_columns"]) | {"IN_GRADS": states.in_grads}
        del constants["BLOCK_K"]
        blocks = (places * self.heads * parts,)
        launch(delta_rule_triton_chunk_grads, blocks, tensors, numbers, constants, self.plan["grad_warps"])


def forward(
    plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, passes: type[DeltaPasses] = DeltaPasses
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in v's dtype and the final state [N, H, K, V] in float32. passes: what launches."""
    run = passes.of(plan, call, cu_seqlens)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = call.v.new_empty(run.sequences, run.heads, call.k.shape[3], call.v.shape[3], dtype=torch.float32)
    if out.numel() == 0:
        return out, _handed_on(call.initial_state, final)
    run.forward(run.prepare(), out, final, None)
    return out, final


def backward(
    plan: Plan,
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    passes: type[DeltaPasses] = DeltaPasses,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of an initial state.

    passes: what launches.
    """
    run = passes.of(plan, call, cu_seqlens)
    length, heads, chunk = call.v.shape[1], run.heads, plan["chunk"]
    width, columns = call.k.shape[3], call.v.shape[3]
    grad_state = None if run.state is None else torch.empty_like(run.state)
    grads = {
        name: torch.empty_like(x, memory_format=torch.contiguous_format)
        for name in ("q", "k", "v", "g", "beta")
        if (x := getattr(call, name)) is not None
    }
    if call.v.numel() == 0:
        if grad_state is not None:
            _handed_on(grad_final, grad_state)
        return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
    do = run.read(torch.zeros_like(call.v) if grad_o is None else grad_o)
    grouped = heads != call.q.shape[2]
    per_head = (*call.v.shape[:3], width)
    # heads of a group are added in float32: rounded first, their errors would be too
    dq, dk = (call.q.new_empty(per_head, dtype=torch.float32) if grouped else grads[name] for name in ("q", "k"))
    dg, dbeta = (
        None if x is None else x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        for x in (grads.get("g"), grads.get("beta"))
    )
    parts = gradient_parts(width)
    if dg is not None and parts > 1:
        dg = dg.new_empty(parts, *dg.shape)

    a = run.prepare()
    if run.shares_memory and cu_seqlens is None and states_fit_gradients(length, columns, chunk):
        states = Slots.within(dq, dk, call.k.dtype, chunk)
    else:
        states = Slots.of(call.k, run.places, heads, width, columns, chunk)
    run.forward(a, None, None, states)

    chunks = _ceil(length, chunk)
    window = max(1, chunks if cu_seqlens is not None else _ceil(chunks, plan["windows"]))
    places = run.places if cu_seqlens is not None else run.sequences * window
    after = Slots.of(call.k, places, heads, width, columns, chunk)
    carry = grad_state
    if carry is None and chunks > window:
        carry = call.v.new_empty(run.sequences, heads, width, columns, dtype=torch.float32)
    first = dfinal = None if grad_final is None else grad_final.contiguous()
    # the last window first; the one at the sequence's end may be shorter
    for lowest in reversed(range(0, max(chunks, 1), window)):
        part = (lowest, min(window, max(chunks, 1) - lowest))
        run.reverse(do, a, first, carry, after, part)
        run.gradients(do, a, states, after, dfinal, (dq, dk, grads["v"], dg, dbeta), part)
        first = carry
    if dg is not None and parts > 1:
        dg = dg.sum(0)
    for name, found in (("g", dg), ("beta", dbeta)):
        if found is not None and found is not grads[name]:
            grads[name].copy_(found)
    if grouped:
        sum_over_groups(dq, dk, grads["q"], grads["k"])
    return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state


def _handed_on(state: Tensor | None, out: Tensor) -> Tensor:
    """What no token changes, written to out; zeros for None."""
    return out.zero_() if state is None else out.copy_(state)
