"""Which of its assemblers Triton makes a Triton kernel for Hopper with.

ptxas 12.8, Triton 3.6's for Hopper, takes the stack's pointer for a descriptor of wgmma in some kernels that are short
of registers, and they read outside of shared memory. ptxas 12.9, which Triton has beside it for Blackwell, does not
(docs/notes/compilers.md#stack-pointer-as-a-descriptor). Gluon's kernels stay with the one that they were measured with;
compile tests look at each of them.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget

_FIRST_RIGHT = (12, 9)
_BLACKWELL = 100


class _Here(threading.local):
    """Whether this thread compiles a kernel that is to have the newer assembler."""

    chooses = False


_HERE = _Here()


def assembler_of(kernel: Any) -> AbstractContextManager[None]:
    """Within it, this thread makes kernel with the assembler that it is to have: of Gluon's Triton's choice."""
    return nullcontext() if getattr(kernel, "is_gluon", bool)() else newer_assembler()


@contextmanager
def newer_assembler() -> Iterator[None]:
    """Within it, kernels with wgmma that this thread compiles are made by the newer assembler, where Triton has one."""
    if not (_is_needed() and hasattr(knobs.runtime, "add_stages_inspection_hook")):
        # another Triton, whose hook may be another too
        yield
        return
    _install()
    _HERE.chooses = True
    try:
        yield
    finally:
        _HERE.chooses = False


def _is_needed() -> bool:
    """Whether Hopper's own assembler has the fault, and another has not. Inductor, for one, may change it meanwhile."""
    try:
        own, other = (
            tuple(map(int, tool.version.split("."))) for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)
        )
    except (AttributeError, RuntimeError, ValueError):
        return False
    return own < _FIRST_RIGHT <= other


def _install() -> None:
    """Has Triton ask `_choose` whenever it compiles; and whoever it asked before."""
    before = knobs.runtime.add_stages_inspection_hook
    if getattr(before, "is_holdfast", False):
        return

    def hook(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: int) -> None:
        if before is not None:
            before(backend, stages, options, language, capability)
        if _HERE.chooses and capability == 90:
            _choose(backend, stages, options)

    hook.is_holdfast = True
    knobs.runtime.add_stages_inspection_hook = hook


def _choose(backend: Any, stages: dict[str, Any], options: Any) -> None:
    own = stages["cubin"]
    # which assembler runs follows from a backend's target, what it makes from the capability that it is given
    newer = type(backend)(GPUTarget("cuda", _BLACKWELL, 32))

    def assemble(ptx: Any, metadata: dict[str, Any]) -> Any:
        if "wgmma" in ptx and _is_needed():
            return newer.make_cubin(ptx, metadata, options, 90)
        return own(ptx, metadata)

    stages["cubin"] = assemble
