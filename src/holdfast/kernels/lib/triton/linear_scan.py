"""The linear scan h -> a h + x, of what comes in any order of association."""

import triton


@triton.jit
def combine(p1, x1, q1, y1, p2, x2, q2, y2):
    """Join two stretches of time, the first before the second.

    A stretch is h -> p h + x through all of it, and h -> q h + y up to its last part. Started from the identity
    (q, y) = (1, 0), the latter is the exclusive scan.
    """
    return p2 * p1, p2 * x1 + x2, q2 * p1, q2 * x1 + y2
