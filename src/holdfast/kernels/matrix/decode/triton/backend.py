"""The backends of decoding without gradients: one token a sequence, and a few on a pool of states."""

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.matrix.decode.call import NormalizedPool, NormalizedTokens, Pool
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.matrix.decode import triton as model
from holdfast.recurrences.definition import MatrixCall


class TritonDecode:
    """One launch that reads the state once and writes it once, in float32 throughout."""

    name = "decode"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if problem["T"] != 1 or problem.varlen:
            return "it takes one token a sequence, not packed"
        if problem.needs_grad:
            return "it has no backward pass"
        if problem["K"] > model.WIDEST:
            return f"K is at most {model.WIDEST}; got {problem['K']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, _, heads, columns = call.v.shape
        shape = (batch, heads, call.k.shape[3], columns + (call.stabilizer is not None))
        after = call.v.new_empty(shape, dtype=torch.float32)
        return self.step(plan, call, after), after

    def step(self, plan: Plan, call: MatrixCall, after: Tensor) -> Tensor:
        """Return o [B, 1, H, V]; after [B, H, K, V (+ 1)] gets the state.

        after may be call.initial_state itself, which is then updated in place, unless there is a normaliser.
        """
        from holdfast.kernels.runtime.launch import on_device_of

        from . import step

        with on_device_of(call.v):
            return step.step(plan, call, after)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        raise NotImplementedError("decode: rejects calls that need gradients")


class TritonPool(TritonDecode):
    """A few tokens a sequence on a pool of states, in float32 in between.

    Its plan does not depend on how many sequences there are, so that no sequence's numbers do.
    """

    MOST_TOKENS = 8

    def reject(self, problem: Problem, device: Device) -> str | None:
        if not 1 <= problem["T"] <= self.MOST_TOKENS:
            return f"it takes 1 to {self.MOST_TOKENS} tokens a sequence; got {problem['T']}"
        one = replace(problem, sizes=tuple((dict(problem.sizes) | {"T": 1}).items()))
        return super().reject(one, device)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        traits = problem.traits
        return (Candidate(model.pool_plan(problem["K"], problem["V"], "keys_last" in traits, "wide_states" in traits)),)

    def update(self, plan: Plan, call: MatrixCall, pool: Pool) -> Tensor:
        """Return o [B, L, H, V]; the pool's states go on."""
        from holdfast.kernels.runtime.launch import on_device_of

        from . import launch

        with on_device_of(call.v):
            return launch.update(plan, call, pool)

    def update_normalized(self, plan: Plan, call: NormalizedTokens, pool: NormalizedPool) -> Tensor:
        """Return h [B, L, H, V]; the pool's C, n and m go on."""
        from holdfast.kernels.runtime.launch import on_device_of

        from . import launch

        with on_device_of(call.v):
            return launch.update_normalized(plan, call, pool)
