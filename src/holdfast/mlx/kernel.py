"""A Metal kernel as mlx knows it: a body kept in its own file, a signature that mlx writes, built on first use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

SOURCES = Path(__file__).parent / "metal"
SIMD_WIDTH = 32

# A template argument is compiled in, so it may depend on the model (dtype, state size) but never on B or L.
TemplateValue = mx.Dtype | int | bool


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
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Launches grid threads in threadgroups; returns one array for each (shape, dtype) of outputs."""
        return _built(self)(
            inputs=list(inputs),
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )

    def text(self, file: str) -> str:
        return (self.folder / f"{file}.metal").read_text(encoding="utf-8")


@cache
def _built(kernel: Kernel):
    return mx.fast.metal_kernel(
        name=f"holdfast_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.text(kernel.body or kernel.name),
        header="".join(["#define FUNCTION inline\n", *(kernel.text(header) for header in kernel.headers)]),
    )
