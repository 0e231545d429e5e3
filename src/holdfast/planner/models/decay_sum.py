"""How often the backward pass of a scalar decay keeps a state, at which it takes up the decay's gradient anew."""

from holdfast.planner import Problem

RARELY, OFTEN = 8, 2


def chunks_between_states(problem: Problem) -> int:
    """Chunks from one kept state to the next.

    Between them what passes a whole chunk is carried on, and errs for all of its tokens alike. A gradient of each token
    shows little of that, but that of a rate, which SSD multiplies with its strengths, adds it up: with RARELY it errs
    by up to 3.5e-2 on an H200, with OFTEN by 5e-3, for 6% of the time (docs/lab-notes.md).
    """
    return OFTEN if "beta" in problem.traits and "normalizer" not in problem.traits else RARELY
