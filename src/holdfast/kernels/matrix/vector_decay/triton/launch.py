"""The launches of vector decay: all chunks prepared at once, states from chunk to chunk, all gradients at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.triton.group_sum import sum_over_groups
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.planner.models.matrix.tiles import chunk_places
from holdfast.planner.models.matrix.vector_decay.triton import CHUNK, GRADIENT_PIECE, PIECE, padded
from holdfast.recurrences.definition import MatrixCall

from .chunk_grads import gla_chunk_grads
from .chunk_prepare import gla_chunk_prepare
from .states import gla_chunk_fwd

# of a chunk's tokens: in `gla_chunk_prepare` each of four warps holds one, in `gla_chunk_grads` two of half as many
# columns
PARTS, GRADIENT_PARTS, GRADIENT_WARPS = 4, 8, 4


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def tokenwise(x: Tensor) -> Tensor:
    """Return x itself if the kernels can read it, else a copy: the last axis dense, a chunk within 32 bits."""
    return x if x.stride(-1) == 1 and CHUNK * x.stride(1) < 2**31 else x.contiguous()


class Prepared(NamedTuple):
    """What `gla_chunk_prepare` writes."""

    q_decayed: Tensor  # [B, T, H, K]
    k_decayed: Tensor | None  # [B, T, H, K]
    chunk_decay: Tensor  # float32 [slots, H, K]
    scores: Tensor | None  # [B, T, H, CHUNK]; None where they are not read


class ChunkGrads(NamedTuple):
    """What `gla_chunk_grads` writes, contiguous, by the heads of v."""

    dq: Tensor | None  # [B, T, H, K]; None: keys read
    dk: Tensor  # [B, T, H, K]
    dg: Tensor  # [B, T, H, K]
    dbeta: Tensor | None  # float32 [blocks of K, B, T, H]


@dataclass(frozen=True)
class Passes:
    """A call as the kernels take it. before_decay: whether queries read before the decay of their own token."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    state: Tensor | None
    scale: float
    cu_seqlens: Tensor | None
    sequences: int
    before_decay: bool = False

    @staticmethod
    def of(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> "Passes":
        """Raises ValueError for offsets that do not rise from 0 to T; while a CUDA graph is captured they go unread."""
        batch, length = call.v.shape[:2]
        cu_seqlens = varlen.on_device(cu_seqlens, length, call.v.device)
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        q, k, v = (tokenwise(x) for x in call[:3])
        assert call.g is not None
        g = call.g.contiguous()
        if g.dtype == torch.float64:
            g = g.float()
        beta = None if call.beta is None else call.beta.float().contiguous()
        state = None if call.initial_state is None else call.initial_state.contiguous()
        return Passes(plan, q, k, v, g, beta, state, call.scale, cu_seqlens, sequences)

    @property
    def slots(self) -> int:
        """One for each chunk; for packed sequences, whose lengths stay on the device, as many as there may be."""
        batch, length = self.v.shape[:2]
        return batch * chunk_places(length, None if self.cu_seqlens is None else self.sequences)

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    def per_head(self, columns: int) -> Tensor:
        """Uninitialised [B, T, H, columns]."""
        return self.v.new_empty(*self.v.shape[:3], columns)

    def per_chunk(self) -> Tensor:
        """Uninitialised, a state for each chunk: [slots, H, V, K]."""
        return self.v.new_empty(self.slots, self.heads, self.v.shape[3], self.k.shape[3])

    def folds(self, dg: Tensor) -> bool:
        """Return whether the memory of dg holds a rounded state for each chunk."""
        fits = dg.element_size() == 2 * self.v.element_size() and self.v.shape[3] <= 2 * CHUNK
        is_whole = self.v.shape[1] % CHUNK == 0 and self.k.shape[3] % GRADIENT_PIECE == 0
        return fits and self.cu_seqlens is None and is_whole

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.heads, self.k.shape[3], self.v.shape[3]

    def numbers(self) -> dict[str, object]:
        """Return what decides precision: beside float32 inputs decays are exact to float32, and products 3xTF32."""
        return {"WIDE": self.v.dtype == torch.float32, "PRECISION": "tf32x3"}

    def prepared_in(self, q_decayed: Tensor, k_decayed: Tensor) -> Prepared:
        """Launch `gla_chunk_prepare` with room for the decayed q and k [B, T, H, K]."""
        chunk_decay = self.v.new_empty(self.slots, self.heads, self.k.shape[3], dtype=torch.float32)
        written = Prepared(q_decayed, k_decayed, chunk_decay, self.per_head(CHUNK))
        self.prepare(written)
        return written

    def prepare(self, written: Prepared) -> None:
        """Launch `gla_chunk_prepare`, which fills `written`."""
        width = self.k.shape[3]
        tensors = (self.q, self.k, self.g, self.beta, *written, self.cu_seqlens)
        numbers = (
            self.v.shape[1], self.sequences, _ceil(width, PIECE), self.scale,
            self.q.stride(0), self.q.stride(2), self.k.stride(0), self.k.stride(2),
        )  # fmt: skip
        constants = {
            "H": self.heads,
            "Q_STEP": self.q.stride(1),
            "K_STEP": self.k.stride(1),
            "GROUP": self.heads // self.q.shape[2],
            "WIDTH": width,
            "BLOCK": PIECE,
            "PARTS": PARTS,
            "BEFORE_DECAY": self.before_decay,
        }
        launch(gla_chunk_prepare, (self.slots * self.heads,), tensors, numbers, constants | self.numbers(), PARTS)

    def run_chunks(
        self,
        prepared: Prepared,
        v: Tensor,
        out: Tensor | None,
        initial: Tensor | None,
        final: Tensor | None,
        saved: Tensor | None = None,
        reverse: bool = False,
        folded: bool = False,
    ) -> None:
        """Launch `gla_chunk_fwd`, which says what the arguments are."""
        width, columns, block = self.k.shape[3], v.shape[3], self.plan["columns"]
        q, k = prepared.q_decayed, prepared.k_decayed
        if reverse:
            q, k = k, q
        tensors = (q, k, v, prepared.scores, prepared.chunk_decay, out, initial, final, saved, self.cu_seqlens)
        numbers = (v.shape[1], v.stride(0), v.stride(2))
        constants = {
            "H": self.heads,
            "V_STEP": v.stride(1),
            "WIDTH": width,
            "COLUMNS": columns,
            "BLOCK_K": padded(width),
            "BLOCK_V": block,
            "STAGES": self.plan["stages"],
            "REVERSE": reverse,
            "FOLDED": folded,
            "PRECISION": "tf32x3",
        }
        blocks = (_ceil(columns, block) * self.heads * self.sequences,)
        launch(gla_chunk_fwd, blocks, tensors, numbers, constants, self.plan["warps"])

    def run_grads(
        self, do: Tensor, states: Tensor, dstates: Tensor | None, grads: ChunkGrads, folded: bool = False
    ) -> None:
        """Launch `gla_chunk_grads`, which says what the arguments are."""
        width, columns = self.k.shape[3], self.v.shape[3]
        tensors = (self.q, self.k, self.v, self.g, self.beta, do, states, dstates, *grads, self.cu_seqlens)
        strides = (x.stride(axis) for x in (self.q, self.k, self.v, do) for axis in (0, 2))
        numbers = (self.v.shape[1], self.sequences, self.scale, self.v.shape[0] * self.v.shape[1], *strides)
        constants = {
            "H": self.heads,
            "Q_STEP": self.q.stride(1),
            "K_STEP": self.k.stride(1),
            "V_STEP": self.v.stride(1),
            "DO_STEP": do.stride(1),
            "GROUP": self.heads // self.q.shape[2],
            "WIDTH": width,
            "COLUMNS": columns,
            "BLOCK_K": GRADIENT_PIECE,
            "BLOCK_V": min(PIECE, padded(columns)),
            "PARTS": GRADIENT_PARTS,
            "FOLDED": folded,
            "BEFORE_DECAY": self.before_decay,
        }
        blocks = (self.slots * self.heads * _ceil(width, GRADIENT_PIECE),)
        launch(gla_chunk_grads, blocks, tensors, numbers, constants | self.numbers(), GRADIENT_WARPS)


def forward(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in v's dtype and the final state [N, H, K, V] in float32."""
    run = Passes.of(plan, call, cu_seqlens)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = call.v.new_empty(run.state_shape(), dtype=torch.float32)
    if final.numel() == 0:
        return out, final
    width = call.k.shape[3]
    prepared = run.prepared_in(run.per_head(width), run.per_head(width))
    run.run_chunks(prepared, run.v, out, run.state, final)
    return out, final


def backward(
    plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of the initial state if it
    is given."""
    run = Passes.of(plan, call, cu_seqlens)
    grad_state = None if run.state is None else torch.empty_like(run.state)
    dq, dk, dv, dg, dbeta = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:5]
    )
    if run.sequences == 0:
        return [dq, dk, dv, dg, dbeta, None], grad_state
    do = tokenwise(torch.zeros_like(call.v) if grad_o is None else grad_o)
    width = call.k.shape[3]
    grouped = run.heads != call.q.shape[2]
    # the gradients' memory holds the decayed q and k until they are written
    head_dq, head_dk = (run.per_head(width) if grouped else x for x in (dq, dk))
    prepared = run.prepared_in(head_dq, head_dk)
    folded = run.folds(dg)
    dstates = dg.view(call.v.dtype) if folded else run.per_chunk()
    dfinal = None if grad_final is None else grad_final.contiguous()
    run.run_chunks(prepared, do, dv, dfinal, grad_state, dstates, reverse=True, folded=folded)
    prepared = prepared._replace(scores=None)
    states = run.per_chunk()
    run.run_chunks(prepared, run.v, None, run.state, None, states)

    blocks = _ceil(width, GRADIENT_PIECE)
    dbeta_parts = None if dbeta is None else call.v.new_empty(blocks, *call.v.shape[:3], dtype=torch.float32)
    run.run_grads(do, states, dstates, ChunkGrads(head_dq, head_dk, dg, dbeta_parts), folded)
    if dbeta is not None:
        dbeta.copy_(dbeta_parts[0] if blocks == 1 else dbeta_parts.sum(0))
    if grouped:
        sum_over_groups(head_dq, head_dk, dq, dk)
    return [dq, dk, dv, dg, dbeta, None], grad_state
