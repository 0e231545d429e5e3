"""What Hopper's rooms launch of plain Triton kernels, by something else."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def launch_by(monkeypatch: Any, launch: Callable[..., None]) -> None:
    """In each of their modules. In runtime/launch.py a module that is imported meanwhile would find it, and keep it."""
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward, launch_forward
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch

    for module in (launch_backward, launch_forward, state_launch):
        monkeypatch.setattr(module, "triton_launch", SimpleNamespace(launch=launch))
