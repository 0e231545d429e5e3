"""A step of the cell as one generated kernel: what torch/pointwise.py does in a score of launches, done in one.

The two functions have the forms of pointwise.forward and pointwise.backward, for float32 tensors on the current NVIDIA
GPU. Every call of them makes launches of its own, for one pass. States are contiguous [n, H, D]; gates are views of
[n, H, G, D] at one gate each, in the cell's order.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from holdfast.kernels.dense.cuda.assemble import assemble
from holdfast.kernels.dense.cuda.launch import ceil
from holdfast.kernels.dense.gate_layout import arrange
from holdfast.kernels.dense.torch.pointwise import Backward, Run
from holdfast.kernels.runtime import nvrtc
from holdfast.recurrences.cell import Cell

THREADS = 256


def forward(cell: Cell, dtype: torch.dtype, device: torch.device) -> Run:
    """(states, gates, tensors to write the new states to) -> None."""
    states, gate = len(cell.states), len(cell.states) + _first_gate(cell)
    launch = _launcher(cell, "dense_cell_step_forward", device, 2 * states + 1)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        launch([*_contiguous(tensors[:states]), tensors[gate], *tensors[-states:]])
        return ()

    return run


def backward(cell: Cell, dtype: torch.dtype, device: torch.device) -> Backward:
    """Nothing is worth computing ahead of the step: prepare hands the states and gates on."""
    states, gates = len(cell.states), len(cell.gates)
    given = 2 * states + _first_gate(cell)
    launch = _launcher(cell, "dense_cell_step_backward", device, 3 * states + 2)

    def prepare(*known: Tensor) -> tuple[Tensor, ...]:
        return (*_contiguous(known[:states]), *known[states:])

    def carry(*tensors: Tensor) -> tuple[Tensor, ...]:
        grads, old = tensors[:states], tensors[states : 2 * states]
        found = torch.empty(states, *old[0].shape, dtype=dtype, device=device).unbind(0)
        launch([*old, *_contiguous(grads), tensors[given], *found, tensors[given + gates]])
        return found

    return Backward(prepare, carry)


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def _first_gate(cell: Cell) -> int:
    """The gate whose column of [n, H, G, D] is 0: its view begins where the whole does."""
    column = arrange(cell).column
    return next(k for k, gate in enumerate(cell.gates) if column[gate] == 0)


def _launcher(cell: Cell, name: str, device: torch.device, pointers: int) -> Callable[[list[Tensor]], None]:
    run = _load(cell, name, device).repeated(THREADS, pointers, 2)

    def launch(tensors: list[Tensor]) -> None:
        first = tensors[0]
        if count := first.numel():
            run(ceil(count, THREADS), tensors, count, first.shape[2])

    return launch


@cache
def _load(cell: Cell, name: str, device: torch.device) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    return nvrtc.load(source_of(cell, name), f"sm_{major}{minor}", name, 0, device.index)


def source_of(cell: Cell, name: str) -> str:
    """name: "dense_cell_step_forward" or "dense_cell_step_backward"."""
    columns = arrange(cell).column
    states = range(len(cell.states))

    def each(text: str, between: str = ", ") -> str:
        return between.join(text.replace("#", str(k)) for k in states)

    if name == "dense_cell_step_forward":
        listed = f"{each('const float* s#')}, const float* gates, {each('float* out#')}"
        body = f"""
    float out[STATES];
    cell_forward(s, g, out);
    {each("out#[at] = out[#];", " ")}"""
    else:
        listed = f"{each('const float* s#')}, {each('const float* d#')}, const float* gates, {each('float* ds#')}, "
        listed += "float* grads"
        body = f"""
    const float d[] = {{{each("d#[at]")}}};
    float ds[STATES], dg[GATES];
    cell_backward(s, g, d, ds, dg);
    {each("ds#[at] = ds[#];", " ")}
    for (int i = 0; i < GATES; i++) grads[first + COLUMN[i] * width] = dg[i];"""
    kernel = f"""
HF_CONSTANT int COLUMN[] = {{{", ".join(str(columns[gate]) for gate in cell.gates)}}};

extern "C" __global__ void __launch_bounds__({THREADS})
{name}({listed}, long long count, long long width) {{
    const long long at = blockIdx.x * {THREADS}ll + threadIdx.x;
    if (at >= count) return;
    const long long row = at / width, first = at + row * (GATES - 1) * width;
    const float s[] = {{{each("s#[at]")}}};
    float g[GATES];
    for (int i = 0; i < GATES; i++) g[i] = gates[first + COLUMN[i] * width];{body}
}}
"""
    # float32 through and through: what is printed for a bfloat16 output would be rounded early
    return assemble(cell, "float32", {}) + kernel
