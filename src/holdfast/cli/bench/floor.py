"""The fewest bytes that a case must move, whatever runs it."""

from torch import Tensor

from holdfast.ops.parity import leaves

from .case import Case


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def floor_bytes(case: Case) -> int:
    """Bytes of a pass that reads each input once and writes each output once.

    The backward pass is a call of its own: it reads the inputs and the output's gradient, and writes a gradient for
    every input. So fwd+bwd moves inputs three times and outputs twice.
    """
    arguments = case.arguments("meta")
    inputs, outputs = _bytes(*leaves(arguments)), _bytes(case.work.output(arguments))
    return inputs + outputs if case.passes == "fwd" else 3 * inputs + 2 * outputs
