"""Decides how a call runs: device, problem, plan. Standard library only, so plans need no GPU and no torch."""

from .candidate import Candidate
from .device import Device
from .floors import Floor, floor
from .occupancy import Grid
from .plan import Direction, Plan
from .problem import Problem

__all__ = ["Candidate", "Device", "Direction", "Floor", "Grid", "Plan", "Problem", "floor"]
