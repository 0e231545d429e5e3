"""The diagonal scan on Hopper, one launch a pass; see hopper_channels.py and hopper_pairs.py."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common.gluon_support import refusal, without_gluon
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import diagonal_hopper as model

from .triton_scan import LONGEST_STEP, Run, TritonScan


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
        return _tileable(x, model.UNIT)

    def _words(self, x: Tensor) -> Tensor:
        return super()._words(_tileable(x, model.UNIT * (2 if self.pairs else 1)))

    def _launch(self, name: str, tensors: tuple[Any, ...], states: tuple[Any, ...], strides: tuple[int, ...]) -> None:
        from holdfast.kernels.common.triton_launch import launch_by_triton

        plan = self.plan
        how = {"BLOCK": plan["block"], "GROUPS": plan["groups"], "STAGES": plan["stages"], "num_warps": plan["warps"]}
        # without a bound, ptxas aims at so few that each load is waited for where it is used
        how["maxnreg"] = plan["registers"]
        if name == "forward":
            how["STEPS"] = plan["steps"]
        if self.pairs:
            from . import hopper_pairs as kernels
            from .triton_pairs import ELEMENTS

            numbers, how["ELEMENT"] = self.channels // 2, ELEMENTS[self.call.x.dtype]
        else:
            from . import hopper_channels as kernels

            numbers, how["LOG"] = self.channels, self.call.log
        grid = (-(-numbers // plan["block"]) * self.pieces,)
        edges = states[:2] if name == "forward" else states[1:3]
        sizes = (self.bounds, self.length, numbers)
        launch_by_triton(getattr(kernels, name), grid, *tensors, *edges, states[-1], *sizes, *strides, **how)


def _tileable(x: Tensor, unit: int) -> Tensor:
    """x, or a copy where its rows are not at multiples of 16 bytes."""
    steady = all(n % unit == 0 for n in x.stride()[:-1]) and x.stride(1) < LONGEST_STEP
    ready = steady and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return x if ready else x.clone(memory_format=torch.contiguous_format)
