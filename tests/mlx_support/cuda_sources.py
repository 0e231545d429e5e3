"""Stands in for `mx.fast.cuda_kernel` where mlx has no CUDA: the source that it would compile, which is not run.

mlx declares a kernel by its arrays' dtypes and puts template arguments at the head of the body. Here the text is put
together in the same form, behind `mlx_device.cuh` in place of mlx's own headers.
"""

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from .cpu import Launch

HERE = Path(__file__).parent
TYPES = {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}


@dataclass
class Cuda:
    """launches is what would have run; texts has the sources by what mlx knows a kernel by, its name and template."""

    launches: list[Launch] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)

    def cuda_kernel(self, name, input_names, output_names, source, header=""):
        def call(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template=()):
            text = generated(
                name, dict(zip(input_names, inputs, strict=True)),
                dict(zip(output_names, output_dtypes, strict=True)), template, source, header,
            )  # fmt: skip
            outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            given, found = (dict(zip(*pair, strict=True)) for pair in ((input_names, inputs), (output_names, outputs)))
            kernel = name.removeprefix("holdfast_").rpartition("_")[0]
            self.texts.setdefault(f"{name} {[value for _, value in template]}", set()).add(text)
            self.launches.append(Launch(kernel, given, found, text, grid, threadgroup))
            return outputs

        return call


def generated(name, inputs, outputs, template, source, header) -> str:
    parameters = []
    for key, x in inputs.items():
        parameters.append(f"const {TYPES[x.dtype]}* {key}")
        if f"{key}_shape" in source:
            parameters.append(f"const __grid_constant__ Shape {key}_shape")
    parameters += [f"{TYPES[dtype]}* {key}" for key, dtype in outputs.items()]
    constants = "".join(
        f"  using {key} = {TYPES[value]};\n" if isinstance(value, mx.Dtype) else f"  constexpr int {key} = {value};\n"
        for key, value in template
    )
    types, device = ((HERE / file).read_text() for file in ("metal_types.h", "mlx_device.cuh"))
    head = device.replace('#include "metal_types.h"', types.replace("#pragma once", ""))
    signature = f"__global__ void custom_kernel_{name}(\n    " + ",\n    ".join(parameters)
    return f'{head}{header}namespace mlx::core::cu {{\nextern "C" {signature}) {{\n{constants}\n{source}\n}}\n}}\n'
