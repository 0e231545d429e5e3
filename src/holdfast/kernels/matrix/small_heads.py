"""Heads so small that their launches wait for neither memory nor tensor cores: they are computed in float32.

A state, an output or a gradient of so few numbers shows the rounding of each operand of a product, which no decay and
no average takes away: a delta write subtracts what was read, a normaliser divides by what may all but cancel.
"""

from holdfast.planner import Problem

# the largest K and V
_DELTA, _NORMALIZER = (16, 64), (16, 16)
REFUSAL = "heads so small are computed in float32, which its products do not take: 'triton' serves them"


def is_small(problem: Problem) -> bool:
    if "delta" in problem.traits:
        most_keys, most_values = _DELTA
    elif "normalizer" in problem.traits:
        most_keys, most_values = _NORMALIZER
    else:
        return False
    return problem["K"] <= most_keys and problem["V"] <= most_values
