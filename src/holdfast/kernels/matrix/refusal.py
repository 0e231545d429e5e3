"""What the matrix family's backends on Hopper refuse alike."""

from collections.abc import Mapping

from holdfast.kernels.lib.gluon import support as gluon_support
from holdfast.planner import Device, Problem


def refusal(problem: Problem, device: Device, unserved: Mapping[str, str]) -> str | None:
    """Why none of their kernels can serve the problem; None where one may. unserved: in words, by trait."""
    if reason := gluon_support.refusal(problem, device):
        return reason
    for trait, what in unserved.items():
        if trait in problem.traits:
            return f"it does not serve {what}"
    for name in "KV":
        if problem[name] % 8:
            return f"TMA copies rows of 16 bytes: it needs a {name} that 8 divides; got {problem[name]}"
    return None
