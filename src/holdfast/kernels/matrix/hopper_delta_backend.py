"""The delta rule on Hopper: chunks are prepared side by side, then swept; backward, two sweeps and all side by side."""

import torch
from torch import Tensor

from holdfast.kernels.common.gluon_support import without_gluon
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import matrix_hopper_delta as model
from holdfast.planner.models import matrix_hopper_delta_wide as wide
from holdfast.planner.models.matrix_hopper import WIDEST
from holdfast.planner.models.matrix_triton_delta import WIDEST as GRADIENTS_WIDEST
from holdfast.recurrences.definition import MatrixCall

from .hopper_matrix import refusal

_UNSERVED = {"decay=vector": "a vector decay", "normalizer": "a normaliser"}
# tokens that the grid of hopper_delta_prepare.py has room for
LONGEST = 65535 * model.CHUNK


class HopperDelta:
    """DeltaNet and Gated DeltaNet in bfloat16 or float16 on NVIDIA's Hopper."""

    name = "hopper"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if "delta" not in problem.traits:
            return "it has the delta rule alone"
        if reason := refusal(problem, device, _UNSERVED):
            return reason
        if problem["K"] > wide.WIDEST:
            return f"its registers hold a state of {wide.WIDEST} rows; got K = {problem['K']}"
        if problem.needs_grad and problem["K"] <= WIDEST and problem["V"] > GRADIENTS_WIDEST:
            return f"its gradients take a V up to {GRADIENTS_WIDEST}; got {problem['V']}"
        if problem["T"] > LONGEST:
            return f"a grid has an axis of 65535 chunks at most: it needs a T up to {LONGEST}; got {problem['T']}"
        return without_gluon()

    def takes(self, call: MatrixCall) -> bool:
        return call.delta

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (model if problem["K"] <= WIDEST else wide).candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from holdfast.kernels.common import varlen
        from holdfast.kernels.common.gluon_launch import aligned

        if call.k.shape[3] > WIDEST:
            from . import triton_delta_passes
            from .hopper_delta_wide_passes import WidePasses

            with torch.cuda.device_of(call.v):
                return triton_delta_passes.forward(plan, call, cu_seqlens, WidePasses)
        from . import hopper_delta_launch as launch
        from .hopper_launch import TOKENS, Gates, tileable

        q, k, v = (tileable(x) for x in call[:3])
        batch, length, heads, values = v.shape
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        cu_seqlens = varlen.on_device(cu_seqlens, length, v.device)
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = torch.empty(sequences, heads, k.shape[3], values, dtype=torch.float32, device=v.device)
        if v.numel() == 0:
            return o, final.zero_() if call.initial_state is None else final.copy_(call.initial_state)
        start = aligned(call.initial_state)
        gates, stages, span = Gates(call.g, call.beta, call.scale), plan["stages"], plan["span"]
        a = launch.run_prepare(k, heads, gates, cu_seqlens)
        if span * TOKENS < length:
            start = launch.entering(k, v, a, gates, plan["state_columns"], stages, span, start, None, cu_seqlens)
        launch.run_sweep(q, k, v, a, o, gates, start, final, None, plan["columns"], stages, span, cu_seqlens)
        return o, final

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from . import hopper_delta_passes, triton_delta_passes

        if call.k.shape[3] > WIDEST:
            from .hopper_delta_wide_passes import WidePasses

            with torch.cuda.device_of(call.v):
                return triton_delta_passes.backward(plan, call, cu_seqlens, grad_o, grad_final, WidePasses)
        if call.v.shape[3] <= WIDEST:
            return hopper_delta_passes.backward(plan, call, cu_seqlens, grad_o, grad_final)
        with torch.cuda.device_of(call.v):
            return triton_delta_passes.backward(plan, call, cu_seqlens, grad_o, grad_final)
