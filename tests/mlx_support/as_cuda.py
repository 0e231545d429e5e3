"""The generated source as CUDA: the same text, behind a prelude that gives Metal's names a CUDA meaning."""

import re
from pathlib import Path

from .msl import signature_of

HERE = Path(__file__).parent
# Metal hands these in as parameters; CUDA has them as built-in variables
ATTRIBUTES = {
    "thread_position_in_grid": "uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z}",
    "threadgroup_position_in_grid": "uint3{blockIdx.x, blockIdx.y, blockIdx.z}",
    "threadgroups_per_grid": "uint3{gridDim.x, gridDim.y, gridDim.z}",
    "thread_index_in_simdgroup": "threadIdx.x % 32",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
}


def as_cuda(text: str) -> str:
    signature = signature_of(text)
    source = signature.as_plain_function(text, before='extern "C" __global__ void')
    values = []
    for name in signature.attributes:
        kind = "uint3" if "grid" in name else "uint"
        source = re.sub(rf",\s*{kind} {name} (?=[,)])", "", source, count=1)
        values.append(f"const {kind} {name} = {ATTRIBUTES[name]};\n")
    head = re.search(rf"void {signature.name}\(.*?\) \{{", source, re.S)
    source = source[: head.end()] + "\n" + "".join(values) + source[head.end() :]
    types, prelude = ((HERE / name).read_text() for name in ("metal_types.h", "metal_on_cuda.h"))
    return prelude.replace('#include "metal_types.h"', types.replace("#pragma once", "")) + source
