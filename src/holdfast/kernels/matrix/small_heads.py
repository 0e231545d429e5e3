"""Heads so small that their launches wait for neither memory nor tensor cores: they are computed in float32.

A state, an output or a gradient of so few numbers shows the rounding of each operand of a product, which no decay and
no average takes away: a delta write subtracts what was read, a normaliser divides by what may all but cancel.
"""

from holdfast.planner import Problem
from holdfast.recurrences.definition import MatrixCall

# the largest K and V
_DELTA, _NORMALIZER = (16, 64), (16, 16)
REFUSAL = "heads so small are computed in float32, which its products do not take: 'triton' serves them"


def is_small(problem: Problem) -> bool:
    traits = problem.traits
    return _are_small(problem["K"], problem["V"], "delta" in traits, "normalizer" in traits)


def is_small_call(call: MatrixCall) -> bool:
    return _are_small(call.k.shape[3], call.v.shape[3], call.delta, call.stabilizer is not None)


def _are_small(keys: int, values: int, delta: bool, normalizer: bool) -> bool:
    if not (delta or normalizer):
        return False
    most_keys, most_values = _DELTA if delta else _NORMALIZER
    return keys <= most_keys and values <= most_values
