"""Decides how a call runs: device, problem, plan. Standard library only, so plans need no GPU and no torch."""

from .device import Device
from .plan import Plan
from .problem import Problem

__all__ = ["Device", "Plan", "Problem"]
