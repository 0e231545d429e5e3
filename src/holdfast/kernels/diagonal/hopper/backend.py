"""The diagonal scan on Hopper, one launch a pass; see real.py and complex.py."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.diagonal.triton.backend import LONGEST_STEP, Run, TritonScan
from holdfast.kernels.lib.gluon.support import refusal, without_gluon
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.diagonal import hopper as model


class HopperScan(TritonScan):
    """Every diagonal recurrence in bfloat16 or float16 on NVIDIA's Hopper, in float32 inside."""

    name = "hopper"

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        unit = model.UNIT * (2 if "complex" in problem.traits else 1)
        if problem["D"] % unit:
            return f"it copies {unit} channels at a time: it needs a D that {unit} divides; got {problem['D']}"
        return without_gluon() or super().reject(problem, device)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def _run(self, plan: Plan, call: Any, cu_seqlens: Tensor | None) -> Run:
        return _Run(plan, call, cu_seqlens, 0, model.ROWS)


class _Run(Run):
    def _rows(self, x: Tensor) -> Tensor:
        return _for_tma(x, model.UNIT)

    def _words(self, x: Tensor) -> Tensor:
        return super()._words(_for_tma(x, model.UNIT * (2 if self.pairs else 1)))

    def _launch(self, name: str, tensors: tuple[Any, ...], states: tuple[Any, ...], strides: tuple[int, ...]) -> None:
        from holdfast.kernels.runtime.launch import launch

        plan = self.plan
        if self.pairs:
            from holdfast.kernels.diagonal.triton.complex import ELEMENTS

            from . import complex as kernels

            found = {"forward": kernels.diagonal_complex_fwd_sm90, "backward": kernels.diagonal_complex_bwd_sm90}
            numbers, read = self.channels // 2, ["a", "theta", "x"]
            how = {"pairs": numbers}, {"ELEMENT": ELEMENTS[self.call.x.dtype]}
        else:
            from . import real as kernels

            found = {"forward": kernels.diagonal_real_fwd_sm90, "backward": kernels.diagonal_real_bwd_sm90}
            numbers, read = self.channels, ["a", "x"]
            how = {"channels": numbers}, {"LOG": self.call.log}
        is_forward = name == "forward"
        read += [] if is_forward else ["grad"]
        steps = dict(zip([f"{x}_step" for x in read], strides[1::2], strict=True))
        of_plan = ("block", "groups", "steps", "stages") if is_forward else ("block", "groups", "stages")
        constants = how[0] | steps | how[1] | {key.upper(): plan[key] for key in of_plan}
        grid = (-(-numbers // plan["block"]) * self.pieces,)
        edges = states[:2] if is_forward else states[1:3]
        given = (*tensors, *edges, states[-1], self.bounds)
        # without a bound, ptxas aims at so few registers that each load is waited for where it is used
        launch(
            found[name], grid, given, (self.length, *strides[::2]), constants, plan["warps"],
            registers=plan["registers"],
        )  # fmt: skip


def _for_tma(x: Tensor, unit: int) -> Tensor:
    """Return x, or a copy where its rows are not at multiples of 16 bytes."""
    steady = all(n % unit == 0 for n in x.stride()[:-1]) and x.stride(1) < LONGEST_STEP
    ready = steady and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return x if ready else x.clone(memory_format=torch.contiguous_format)
