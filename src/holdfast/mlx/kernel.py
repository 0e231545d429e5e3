"""A kernel as mlx knows it: a body kept in its own file, a signature that mlx writes, built on first use.

Bodies are in Metal. MLX's CUDA back end compiles the same text behind `cuda/`, which gives Metal's names their meaning
in CUDA.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

SOURCES = Path(__file__).parent / "metal"
CUDA = Path(__file__).parent / "cuda"
SIMD_WIDTH = 32
# blocks of a CUDA grid in y and z
MOST_BLOCKS = 65535

# A template argument is compiled in, so it may depend on the model (dtype, state size) but never on B or L.
TemplateValue = mx.Dtype | int | bool
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """The body in `metal/<name>.metal`, after the header files that it needs.

    Attributes:
        name: of the kernel, and of its file unless `body` names another.
        inputs, outputs: names of its buffers, in order. The body reads sizes from `<input>_shape`, which mlx passes as
            a buffer, so that another B or L runs the same compiled kernel.
        headers: files of `metal/` that come before it.
        body: the file, for a kernel that shares it with another and differs in its headers.
        folder: where the files are.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()
    body: str | None = None
    folder: Path = SOURCES

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: dict[str, TemplateValue],
        grid: Size,
        threadgroup: Size,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Launches grid threads in threadgroups; returns one array for each (shape, dtype) of outputs.

        Raises ValueError on CUDA for a grid that it cannot have.
        """
        if has_cuda():
            built, template = _built_for_cuda(self), template | self._input_dtypes(inputs)
            if max(grid[1:]) > MOST_BLOCKS:
                raise ValueError(
                    f"{self.name}: expected a batch and heads of at most {MOST_BLOCKS} on CUDA; got {grid}"
                )
        else:
            built = _built(self)
        return built(
            inputs=list(inputs),
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )

    def text(self, file: str) -> str:
        return (self.folder / f"{file}.metal").read_text(encoding="utf-8")

    @property
    def source(self) -> str:
        return self.text(self.body or self.name)

    @property
    def header(self) -> str:
        return "".join(self.text(header) for header in self.headers)

    def _input_dtypes(self, inputs: Sequence[mx.array]) -> dict[str, TemplateValue]:
        """mlx finds a CUDA kernel again by its name and template alone, which say nothing of what it reads."""
        return {f"INPUT_{name}": x.dtype for name, x in zip(self.inputs, inputs, strict=True)}


def has_cuda() -> bool:
    """Whether kernels run by MLX's CUDA back end."""
    return mx.cuda.is_available()


@cache
def _built(kernel: Kernel) -> Any:
    return mx.fast.metal_kernel(
        name=f"holdfast_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=f"#define FUNCTION inline\n{kernel.header}",
    )


@cache
def _built_for_cuda(kernel: Kernel) -> Any:
    names, positions = ((CUDA / file).read_text(encoding="utf-8") for file in ("metal_names.cuh", "positions.cuh"))
    # CUDA has no address spaces to name, and `device` is in what NVRTC makes of __device__: no macro can be empty
    bodies = (re.sub(r"\b(device|constant|thread) ", "", text) for text in (kernel.header, kernel.source))
    header, source = (first + text for first, text in zip((names, positions), bodies, strict=True))
    # mlx keeps compiled CUDA kernels on disk by name, whatever their source
    version = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"holdfast_{kernel.name}_{version}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source,
        header=header,
    )
