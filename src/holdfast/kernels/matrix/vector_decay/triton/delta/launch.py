"""The launches of the delta rule with a vector decay, and the additive calls that its gradients are.

Once u = beta (v - S^T k) is known the state is that of vector decay with values u, and so are its gradients: o is read
of it by q, and what u subtracts by k, just before the token's own write. Both are calls of vector decay's backward.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.matrix.vector_decay.additive import gradients_of
from holdfast.kernels.matrix.vector_decay.triton import launch as additive
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.planner.models.matrix.vector_decay.triton import CHUNK, padded
from holdfast.recurrences.definition import MatrixCall

from .chunk_inverse import kda_chunk_inverse
from .states import kda_bwd, kda_fwd

PRECISION = "tf32x3"


class Chunks(NamedTuple):
    """What all chunks are at once: see states.py."""

    q_in: Tensor  # [B, T, H, K]
    k_in: Tensor  # [B, T, H, K]
    k_out: Tensor  # [B, T, H, K]
    decay: Tensor  # float32 [slots, H, K]
    scores: Tensor  # [B, T, H, CHUNK]
    pairs: Tensor  # float32 [B, T, H, CHUNK]
    inverse: Tensor  # [B, T, H, CHUNK]


@dataclass(frozen=True)
class Passes:
    """A call as the kernels take it. of: the additive call of its q and k."""

    of: additive.Passes
    beta: Tensor | None

    @staticmethod
    def take(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> "Passes":
        beta = None if call.beta is None else call.beta.float().contiguous()
        return Passes(additive.Passes.of(plan, call._replace(beta=None), cu_seqlens), beta)

    def prepare(self) -> Chunks:
        """Launch what all chunks take at once."""
        run, width = self.of, self.of.k.shape[3]
        q_in, k_in, k_out = (run.per_head(width) for _ in range(3))
        read = run.prepare(q_in, k_out)
        pairs = run.v.new_empty(*run.v.shape[:3], CHUNK, dtype=torch.float32)
        replace(run, q=run.k, scale=1.0).prepare(k_in, None, pairs)
        inverse = run.per_head(CHUNK)
        tensors = (pairs, self.beta, inverse, run.cu_seqlens)
        numbers = (run.v.shape[1], run.sequences)
        constants = {"H": run.heads, "PRECISION": PRECISION}
        launch(kda_chunk_inverse, (run.slots * run.heads,), tensors, numbers, constants, 4)
        assert read.scores is not None
        return Chunks(q_in, k_in, k_out, read.chunk_decay, read.scores, pairs, inverse)

    def _constants(self, **strides: int) -> dict[str, object]:
        run = self.of
        return {
            "H": run.heads,
            **strides,
            "WIDTH": run.k.shape[3],
            "COLUMNS": run.v.shape[3],
            "BLOCK_K": padded(run.k.shape[3]),
            "BLOCK_V": run.plan["columns"],
            "STAGES": run.plan["stages"],
            "PRECISION": PRECISION,
        }

    @property
    def splits(self) -> int:
        return -(-self.of.v.shape[3] // self.of.plan["columns"])

    def _blocks(self) -> tuple[int]:
        return (self.splits * self.of.heads * self.of.sequences,)

    def run_forward(self, chunks: Chunks, o: Tensor | None, x: Tensor | None, final: Tensor | None) -> None:
        """Launch `kda_fwd`, which says what the arguments are."""
        run, v = self.of, self.of.v
        tensors = (
            chunks.q_in, chunks.k_in, chunks.k_out, v, self.beta, chunks.scores, chunks.inverse, chunks.decay,
            run.state, o, x, final, run.cu_seqlens,
        )  # fmt: skip
        constants = self._constants(V_STEP=v.stride(1))
        numbers = (v.shape[1], v.stride(0), v.stride(2))
        launch(kda_fwd, self._blocks(), tensors, numbers, constants, run.plan["warps"])

    def run_backward(
        self, chunks: Chunks, x: Tensor, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Launch `kda_bwd`; return dv [B, T, H, V] and dbeta, float32 [B, T, H]."""
        run, v = self.of, self.of.v
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dbeta = v.new_empty(self.splits, *v.shape[:3], dtype=torch.float32)
        tensors = (
            chunks.q_in, chunks.k_in, chunks.k_out, self.beta, chunks.scores, chunks.inverse, chunks.pairs,
            chunks.decay, x, do, dfinal, dv, dbeta, dinitial, run.cu_seqlens,
        )  # fmt: skip
        constants = self._constants(DO_STEP=do.stride(1))
        numbers = (v.shape[1], v.shape[0] * v.shape[1], do.stride(0), do.stride(2))
        launch(kda_bwd, self._blocks(), tensors, numbers, constants, run.plan["warps"])
        return dv, dbeta[0] if self.splits == 1 else dbeta.sum(0)


def forward(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in v's dtype and the final state [N, H, K, V] in float32."""
    run = Passes.take(plan, call, cu_seqlens)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = call.v.new_empty(run.of.state_shape(), dtype=torch.float32)
    if final.numel():
        run.run_forward(run.prepare(), o, None, final)
    return o, final


def backward(
    plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of the initial state if it
    is given."""
    run = Passes.take(plan, call, cu_seqlens)
    dinitial = None if run.of.state is None else torch.empty_like(run.of.state)
    if run.of.sequences == 0:
        return [None if x is None else torch.empty_like(x) for x in call[:5]] + [None], dinitial
    do = torch.zeros_like(call.v) if grad_o is None else grad_o
    do = additive.tokenwise(do)
    dfinal = None if grad_final is None else grad_final.contiguous()
    chunks = run.prepare()
    x = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    run.run_forward(chunks, None, x, None)
    dv, dbeta = run.run_backward(chunks, x, do, dfinal, dinitial)
    del chunks
    u = x if run.beta is None else (x * run.beta[..., None]).to(x.dtype)
    written = call._replace(v=u, beta=None, delta=False)
    gradients = gradients_of(written, cu_seqlens)
    dq, dk, _, dg, *_ = gradients(written, do, dfinal)
    # by each key of the state with its own write, of which that write is no part
    dk_read, dk_written, _, dg_read, *_ = gradients(written._replace(q=call.k, scale=1.0), -dv, None)
    own = (u.float() * dv.float()).sum(-1, keepdim=True)
    own = own.unflatten(2, (call.k.shape[2], -1)).sum(3)
    dk = (dk.float() + dk_read.float() + dk_written.float() + 2 * own * call.k.float()).to(call.k.dtype)
    grad_beta = None if call.beta is None else dbeta.to(call.beta.dtype)
    return [dq, dk, dv, (dg.float() + dg_read.float()).to(dg.dtype), grad_beta, None], dinitial
