"""The launches of the delta rule with a vector decay; gradients of q, k and g are those of additive.py.

Where vector decay's kernels on Hopper serve the sizes, one of theirs prepares the chunks. A decay a head, beside an
erase key, is one of each key channel, whose gradients are added.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.matrix.vector_decay.additive import ChunkGradients, by_heads, hopper_serves
from holdfast.kernels.matrix.vector_decay.saved import Chunks, SavedChunks
from holdfast.kernels.matrix.vector_decay.triton import launch as additive
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.planner.models.matrix.vector_decay.triton import padded
from holdfast.recurrences.definition import MatrixCall

from .chunk_inverse import kda_chunk_inverse
from .states import kda_bwd, kda_fwd

PRECISION = "tf32x3"


class StateGrads(NamedTuple):
    """float32 [N, H, K, V]: of the final state, or None for 0, and of the initial one, written, or None."""

    final: Tensor | None
    initial: Tensor | None


@dataclass(frozen=True)
class Passes:
    """A call as the kernels take it.

    of: the additive call of its q and k. erase: the key that reads before a write. before_decay: whether it also reads
    before the decay. on_hopper: `hopper_serves`.
    """

    of: additive.Passes
    erase: Tensor
    beta: Tensor | None
    before_decay: bool
    on_hopper: bool

    @staticmethod
    def take(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> "Passes":
        beta = None if call.beta is None else call.beta.float().contiguous()
        call = by_heads(call)
        of = additive.Passes.of(plan, call._replace(beta=None), cu_seqlens)
        erase = of.k if call.e is None else additive.tokenwise(call.e)
        return Passes(of, erase, beta, call.erase_before_decay, hopper_serves(call, cu_seqlens))

    @property
    def saved(self) -> SavedChunks:
        run = self.of
        return SavedChunks(
            *run.v.shape[:3], run.k.shape[3], None if run.cu_seqlens is None else run.sequences, run.v.dtype
        )

    def prepare(self, chunks: Chunks) -> None:
        """Launch what all chunks take at once, which fills chunks."""
        run = self.of
        if self._is_hoppers:
            self._by_hopper(chunks)
        else:
            self._by_triton(chunks)
        tensors = (chunks.pairs, self.beta, chunks.inverse, run.cu_seqlens)
        numbers = (run.v.shape[1], run.sequences)
        constants = {"H": run.heads, "PRECISION": PRECISION}
        launch(kda_chunk_inverse, (run.slots * run.heads,), tensors, numbers, constants, 4)

    @property
    def _is_hoppers(self) -> bool:
        """Whether Hopper's kernel prepares the chunks: it has one key."""
        return self.on_hopper and self.erase is self.of.k

    def _by_hopper(self, chunks: Chunks) -> None:
        from holdfast.kernels.matrix.vector_decay.hopper.delta.launch import run_prepare

        run = self.of
        run_prepare(run.q, run.k, run.g, run.scale, chunks, run.slots, run.cu_seqlens)

    def _by_triton(self, chunks: Chunks) -> None:
        run = self.of
        run.prepare(additive.Prepared(chunks.q_in, chunks.k_out, chunks.decay, chunks.scores))
        erasing = replace(run, q=self.erase, scale=1.0, before_decay=self.before_decay)
        # the chunks' decays once more
        erasing.prepare(additive.Prepared(chunks.k_in, None, chunks.decay, chunks.pairs))

    def _constants(self, tiled: bool, **strides: int) -> dict[str, object]:
        run = self.of
        return {
            "H": run.heads,
            **strides,
            "WIDTH": run.k.shape[3],
            "COLUMNS": run.v.shape[3],
            "BLOCK_K": padded(run.k.shape[3]),
            "BLOCK_V": run.plan["columns"],
            "STAGES": run.plan["stages"],
            "TILED": tiled,
            "PRECISION": PRECISION,
        }

    @property
    def splits(self) -> int:
        return -(-self.of.v.shape[3] // self.of.plan["columns"])

    def _blocks(self) -> tuple[int]:
        return (self.splits * self.of.heads * self.of.sequences,)

    def run_forward(self, chunks: Chunks, o: Tensor | None, final: Tensor | None) -> None:
        """Launch `kda_fwd`, which says what the arguments are."""
        self._forward(chunks, (o, None, None, None, final), False)

    def write(self, chunks: Chunks, states: Tensor, tiled: bool) -> tuple[Tensor, Tensor]:
        """Launch `kda_fwd` for what the backward pass needs: fill states, return x and u [B, T, H, V]."""
        v = self.of.v
        x = torch.empty_like(v, memory_format=torch.contiguous_format)
        u = None if self.beta is None else torch.empty_like(x)
        self._forward(chunks, (None, x, u, states, None), tiled)
        return x, x if u is None else u

    def _forward(self, chunks: Chunks, written: tuple[Tensor | None, ...], tiled: bool) -> None:
        run, v = self.of, self.of.v
        tensors = (
            chunks.q_in, chunks.k_in, chunks.k_out, v, self.beta, chunks.scores, chunks.inverse, chunks.decay,
            run.state, *written, run.cu_seqlens,
        )  # fmt: skip
        constants = self._constants(tiled, V_STEP=v.stride(1))
        numbers = (v.shape[1], v.stride(0), v.stride(2))
        launch(kda_fwd, self._blocks(), tensors, numbers, constants, run.plan["warps"])

    def run_backward(
        self, chunks: Chunks, x: Tensor, do: Tensor, of_states: StateGrads, dstates: Tensor, tiled: bool
    ) -> tuple[Tensor, Tensor]:
        """Launch `kda_bwd`; return dv [B, T, H, V] and dbeta, float32 [B, T, H]."""
        run, v = self.of, self.of.v
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dbeta = v.new_empty(self.splits, *v.shape[:3], dtype=torch.float32)
        tensors = (
            chunks.q_in, chunks.k_in, chunks.k_out, self.beta, chunks.scores, chunks.inverse, chunks.pairs,
            chunks.decay, x, do, of_states.final, dv, dbeta, dstates, of_states.initial, run.cu_seqlens,
        )  # fmt: skip
        constants = self._constants(tiled, DO_STEP=do.stride(1))
        numbers = (v.shape[1], v.shape[0] * v.shape[1], do.stride(0), do.stride(2))
        launch(kda_bwd, self._blocks(), tensors, numbers, constants, run.plan["warps"])
        return dv, dbeta[0] if self.splits == 1 else dbeta.sum(0)


def by_channels(call: MatrixCall) -> MatrixCall:
    """Return the call with a decay of each key channel, [B, T, H, K]; one a head is copied for each, in float32."""
    assert call.g is not None
    if call.g.dim() == 4:
        return call
    g = call.g.float()[..., None].expand(*call.g.shape, call.k.shape[3])
    return call._replace(g=g.contiguous())


def forward(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Return o [B, T, H, V] in v's dtype, the final state [N, H, K, V] in float32 and, if the plan saves them, the
    chunks, in one tensor."""
    call = by_channels(call)
    run = Passes.take(plan, call, cu_seqlens)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = call.v.new_empty(run.of.state_shape(), dtype=torch.float32)
    if final.numel() == 0:
        return o, final
    saved = run.saved.empty(o.device)
    chunks = run.saved.chunks(saved)
    run.prepare(chunks)
    run.run_forward(chunks, o, final)
    return (o, final, saved) if plan["saves"] else (o, final)


def backward(
    plan: Plan,
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    o: Tensor | None = None,
    saved: Tensor | None = None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the gradients of (q, k, v, g, beta, stabilizer), None where the input is, of e where it is given, and of
    the initial state if it is given.

    saved: what forward saved; without it, chunks are prepared again. o is not read.
    """
    given, call = call, by_channels(call)
    run = Passes.take(plan, call, cu_seqlens)
    dinitial = None if run.of.state is None else torch.empty_like(run.of.state)
    if run.of.sequences == 0:
        inputs = (*given[:6], *(() if call.e is None else (call.e,)))
        return [None if x is None else torch.empty_like(x) for x in inputs], dinitial
    do = additive.tokenwise(torch.zeros_like(call.v) if grad_o is None else grad_o)
    dfinal = None if grad_final is None else grad_final.contiguous()
    gradients = ChunkGradients(call, cu_seqlens, run.on_hopper)
    states, dstates = (gradients.room_for_states(run.of.slots) for _ in range(2))
    chunks = run.saved.chunks(run.saved.empty(do.device) if saved is None else saved)
    if saved is None:
        run.prepare(chunks)
    x, u = run.write(chunks, states, gradients.tiled)
    dv, dbeta = run.run_backward(chunks, x, do, StateGrads(dfinal, dinitial), dstates, gradients.tiled)
    del chunks, x
    dq, dk, dg, *de = gradients.find(u, do, dv, states, dstates, plan)
    if given.g.dim() == 3:
        dg = dg.sum(3).to(given.g.dtype)
    return [dq, dk, dv, dg, None if call.beta is None else dbeta.to(call.beta.dtype), None, *de], dinitial
