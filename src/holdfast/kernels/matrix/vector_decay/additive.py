"""Vector decay's gradients of q, k and g for the delta rule, chunk by chunk, by the backend that serves the sizes best.

Once u = beta (v - S^T k) is known, the state is that of vector decay with values u. o is read of it by q, and what u
subtracts by k or an erase key, just before the token's own write, or before its decay too. So vector decay's kernel of
gradients runs for each, with the states before all chunks and the gradients of those after them that the delta rule's
passes leave.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.backend import describe
from holdfast.kernels.lib.triton.group_sum import ungroup
from holdfast.kernels.matrix.problem import problem
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA, saved_sizes
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import MatrixCall

# (do, states, dstates, (dq or None, dk, dg)) of one reading: see the kernels
Launch = Callable[[Tensor, Tensor, Tensor | None, tuple[Tensor | None, Tensor, Tensor]], None]


@dataclass(frozen=True)
class ChunkGradients:
    """call: the delta rule's. tiled: whether states are as vector_decay/hopper has them (`hopper_serves`), or as Triton
    has them."""

    call: MatrixCall
    cu_seqlens: Tensor | None
    tiled: bool

    def room_for_states(self, slots: int) -> Tensor:
        """Return memory for a state of each chunk, in v's dtype."""
        v, width = self.call.v, self.call.k.shape[3]
        if not self.tiled:
            return v.new_empty(slots, v.shape[2], v.shape[3], width)
        sequences = None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        # values that a tile has beyond v's are read
        make = v.new_zeros if v.shape[3] % 64 else v.new_empty
        return make(saved_sizes(v.shape, width, sequences))

    def find(
        self, u: Tensor, do: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, plan: Plan
    ) -> tuple[Tensor, ...]:
        """Return dq, dk [B, T, Hq, K] in their dtype, dg [B, T, H, K] in g's, and de [B, T, He, K] of an erase key.

        u, do, dv: [B, T, H, V]. states, dstates: before each chunk, and the gradient of the one after it, in
        `room_for_states`.
        """
        call = by_heads(self.call)
        written = call._replace(v=u, beta=None, delta=False, initial_state=None)
        read, erase = (self._hopper if self.tiled else self._triton)(written, plan)
        shape = (*u.shape[:3], self.call.k.shape[3])
        dq, dk = u.new_empty(shape), u.new_empty(shape)
        dg = torch.empty(shape, dtype=torch.float32, device=u.device)
        read(do, states, dstates, (dq, dk, dg))
        assert self.call.g is not None
        of_e: tuple[Tensor, ...] = ()
        if call.e is None:
            erase(dv, states, None, (None, dk, dg))
        else:
            assert self.call.e is not None
            de = torch.empty_like(dq)
            erase(dv, states, None, (de, dk, dg))
            of_e = (ungroup(de, de, self.call.e.shape[2])[0],)
        dq, dk = ungroup(dq, dk, self.call.q.shape[2])
        return dq, dk, dg.to(self.call.g.dtype), *of_e

    def _hopper(self, written: MatrixCall, plan: Plan) -> tuple[Launch, Launch]:
        from holdfast.kernels.matrix.vector_decay.hopper import launch
        from holdfast.kernels.runtime.tma import for_tma

        cu_seqlens = varlen.on_device(self.cu_seqlens, written.v.shape[1], written.v.device)
        inputs = launch.Inputs.of(written, cu_seqlens)

        def run(given: launch.Inputs) -> Launch:
            return lambda do, states, dstates, grads: launch.run_grads(
                given, for_tma(do), states, dstates, launch.Grads(*grads, None)
            )

        e = inputs.k if written.e is None else for_tma(written.e)
        return run(inputs), run(replace(inputs, q=e, scale=-1.0, before_decay=written.erase_before_decay))

    def _triton(self, written: MatrixCall, plan: Plan) -> tuple[Launch, Launch]:
        from holdfast.kernels.matrix.vector_decay.triton import launch

        inputs = launch.Passes.of(plan, written, self.cu_seqlens)

        def run(given: launch.Passes) -> Launch:
            return lambda do, states, dstates, grads: given.run_grads(
                do, states, dstates, launch.ChunkGrads(*grads, None)
            )

        e = inputs.k if written.e is None else launch.tokenwise(written.e)
        return run(inputs), run(replace(inputs, q=e, scale=-1.0, before_decay=written.erase_before_decay))


def by_heads(call: MatrixCall) -> MatrixCall:
    """Return the call with q and k for each of v's heads where its erase key has other heads than they."""
    if call.e is None or call.e.shape[2] == call.q.shape[2]:
        return call
    heads = call.v.shape[2]
    q, k, e = (x.repeat_interleave(heads // x.shape[2], 2) for x in (call.q, call.k, call.e))
    return call._replace(q=q, k=k, e=e)


def hopper_serves(call: MatrixCall, cu_seqlens: Tensor | None) -> bool:
    """Return whether vector decay's kernels on Hopper take a call of the delta rule: its chunks, and its gradients."""
    alone = call._replace(beta=None, delta=False, e=None)
    additive = problem("gla", alone, cu_seqlens, True)
    return call.v.numel() > 0 and _serves(additive, describe(call.v.device))


@cache
def _serves(additive: Problem, device: Device) -> bool:
    return not HopperGLA().reject(additive, device)
