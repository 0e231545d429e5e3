"""Programmatic dependent launch: a kernel waits for the one ahead, and lets the next one start."""

from .compat import gl, gluon


@gluon.jit
def grid_dependency_wait():
    """Wait until the launch ahead, which may still run, has ended and what it wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """Let the blocks of the launch behind start where there is room."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
