"""What the matrix family's backends refuse, and which refusal is worth telling of kernels that share a name."""

from collections.abc import Mapping

from holdfast.kernels.lib.gluon import support as gluon_support
from holdfast.planner import Device, Problem


class AnothersKernel(str):
    """A refusal by the kernel of another recurrence: of no interest where the kernel for this one refuses too."""

    __slots__ = ()


def refusal(problem: Problem, device: Device, unserved: Mapping[str, str]) -> str | None:
    """Why none of their kernels can serve the problem; None where one may. unserved: in words, by trait."""
    if reason := gluon_support.refusal(problem, device):
        return reason
    for trait, what in unserved.items():
        if trait in problem.traits:
            said = f"it does not serve {what}"
            return said if trait == "varlen" else AnothersKernel(said)
    for name in "KV":
        if problem[name] % 8:
            return f"TMA copies rows of 16 bytes: it needs a {name} that 8 divides; got {problem[name]}"
    return None
